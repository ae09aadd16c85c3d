"""Who waits for a peer that is gone can be told so, on every road, from another thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.builtins.resharders.disk import DiskResharder
from areal.builtins.resharders.xccl import XcclOptions, XcclResharder
from areal.contracts.resharder import Interrupts, Resharder
from areal.contracts.transfer import Layout, TensorSpec
from areal.errors import TransferFailed

LONG_S = 60.0


def layout(host: str = "here") -> Layout:
    spec = TensorSpec(name="a", shape=(2,), dtype="float32")
    return Layout(host=host, address="127.0.0.1", collective="gloo", dtype="float32", tensors=(spec,))


def road(name: str, folder: Path) -> Resharder:
    if name == "disk":
        return DiskResharder(None, str(folder))
    return XcclResharder(XcclOptions(shared_memory="auto" if name == "shared memory" else "never"), "")


def ended_after(waiting: Callable[[], Any], interrupt: Callable[[], None]) -> float:
    """Wait in a thread, interrupt it after a moment; return for how long it waited on. It must raise TransferFailed."""
    found: list[BaseException] = []

    def run() -> None:
        try:
            waiting()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.3)
    assert thread.is_alive(), found
    began = time.monotonic()
    interrupt()
    thread.join(20)
    assert isinstance(found[0], TransferFailed), found
    return time.monotonic() - began


@pytest.mark.parametrize("name", ["disk", "shared memory", "collective"])
def test_a_receiver_whose_sender_never_comes(tmp_path: Path, name: str) -> None:
    resharder = road(name, tmp_path)
    receiver = resharder.receiver(resharder.plan(layout(), [layout()]), 0)
    assert isinstance(receiver, Interrupts)
    receiver.interrupt()  # before anything runs it changes nothing
    assert ended_after(lambda: list(receiver.receive(3, LONG_S)), receiver.interrupt) < 5.0
    receiver.close()


def test_a_sender_whose_receivers_never_come(tmp_path: Path) -> None:
    resharder = road("collective", tmp_path)
    sender = resharder.sender(resharder.plan(layout(), [layout()]))
    assert isinstance(sender, Interrupts)
    tensors = [("a", torch.ones(2))]
    assert ended_after(lambda: sender.send(3, tensors, LONG_S), sender.interrupt) < 5.0
    sender.close()
