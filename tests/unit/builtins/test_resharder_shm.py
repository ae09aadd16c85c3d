"""Weights through shared memory: what was yielded never changes, and nothing stays behind."""

from __future__ import annotations

import errno
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.builtins.resharders import segment, shm, shm_receiver
from areal.builtins.resharders.shm import ShmSender, plan_folder
from areal.builtins.resharders.shm_receiver import ShmReceiver
from areal.builtins.resharders.xccl import XcclOptions, XcclResharder
from areal.contracts.transfer import Layout, Plan, TensorSpec
from areal.errors import TransferFailed

NAMES = ("a", "b")


def weights(value: float) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.full((300, 70), float(value))) for name in NAMES]


def make_plan() -> Plan:
    tensors = tuple(TensorSpec(name=name, shape=(300, 70), dtype="float32") for name in NAMES)
    plan = XcclResharder(XcclOptions(), "").plan(Layout(host="h", tensors=tensors), [Layout(host="h")] * 2)
    assert plan.details == {"road": "shared_memory"}
    return plan


@pytest.fixture
def plan() -> Iterator[Plan]:
    plan = make_plan()
    yield plan
    assert not plan_folder(plan.uid).exists()


@pytest.fixture
def sender(plan: Plan) -> Iterator[ShmSender]:
    sender = ShmSender(plan)
    yield sender
    sender.close()
    sender.close()


def segments(plan: Plan) -> list[str]:
    return sorted(path.name for path in plan_folder(plan.uid).iterdir() if path.name != "owner")


def test_what_was_received_never_changes(plan: Plan, sender: ShmSender) -> None:
    receivers = [ShmReceiver(plan, member) for member in (0, 1)]
    held = []
    for version in range(1, 6):
        sender.send(version, weights(version), 5)
        held.append([dict(receiver.receive(version, 5)) for receiver in receivers])
    sender.close()
    for version, both in enumerate(held, 1):
        for tensors in both:
            assert all(bool((tensors[name] == version).all()) for name in NAMES)


def test_writing_to_what_was_received_changes_nobody(plan: Plan, sender: ShmSender) -> None:
    sender.send(1, weights(1), 5)
    first, second = (dict(ShmReceiver(plan, member).receive(1, 5)) for member in (0, 1))
    first["a"].zero_()
    assert bool((second["a"] == 1).all())
    assert bool((dict(ShmReceiver(plan, 0).receive(1, 5))["a"] == 1).all())


def mappings(plan: Plan) -> set[str]:
    """Return where this process has mapped the plan's segments privately, as receivers do."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return {line.split()[0] for line in lines if plan.uid in line and line.split()[1] == "rw-p"}


def test_a_segment_stays_mapped_for_the_next_version_in_it(plan: Plan, sender: ShmSender) -> None:
    receiver, seen = ShmReceiver(plan, 0), list[set[str]]()
    for version in range(1, 7):
        sender.send(version, weights(version), 5)
        assert all(bool((tensor == version).all()) for _, tensor in receiver.receive(version, 5))
        seen.append(mappings(plan))
    assert len(seen[1]) == 2 and all(each == seen[1] for each in seen[1:])
    receiver.close()
    receiver.close()
    assert not mappings(plan)


def test_what_a_consumer_wrote_is_gone_with_the_next_version(plan: Plan, sender: ShmSender) -> None:
    receiver = ShmReceiver(plan, 0)
    for version in range(1, 6):
        sender.send(version, weights(version), 5)
        for _ in range(2):  # a second time too, though the tensors of the first are alive
            arrived = dict(receiver.receive(version, 5))
            assert all(bool((tensor == version).all()) for tensor in arrived.values()), version
            arrived["b"][100:200] = -1.0
            again = dict(receiver.receive(version, 5))
            assert bool((again["b"] == version).all())
        del arrived, again
    receiver.close()


def test_segments_that_were_given_back_do_not_stay_mapped(plan: Plan, sender: ShmSender) -> None:
    receiver, held = ShmReceiver(plan, 0), []
    for version in range(1, 5):
        sender.send(version, weights(version), 5)
        held.append(dict(receiver.receive(version, 5)))
    held.clear()
    for version in (5, 6, 7):
        sender.send(version, weights(version), 5)
        assert dict(receiver.receive(version, 5))["a"][0, 0] == version
    assert len(segments(plan)) == len(mappings(plan)) == 2
    receiver.close()


def test_where_room_is_short_nothing_stays_mapped(
    plan: Plan, sender: ShmSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm_receiver, "room_for", lambda size: False)
    receiver = ShmReceiver(plan, 0)
    for version in (1, 2, 3):
        sender.send(version, weights(version), 5)
        assert dict(receiver.receive(version, 5))["a"][0, 0] == version
        assert not mappings(plan)


def test_two_segments_are_used_in_turn(plan: Plan, sender: ShmSender) -> None:
    receiver = ShmReceiver(plan, 0)
    for version in range(1, 7):
        sender.send(version, weights(version), 5)
        assert dict(receiver.receive(version, 5))["b"][0, 0] == version
    inodes = {path.stat().st_ino for path in plan_folder(plan.uid).iterdir() if path.name != "owner"}
    assert len(inodes) == 2
    assert segments(plan)[1] == "v00000006"


def test_segments_that_a_slow_engine_needed_are_given_back(plan: Plan, sender: ShmSender) -> None:
    receiver = ShmReceiver(plan, 0)
    held = []
    for version in range(1, 5):
        sender.send(version, weights(version), 5)
        held.append(dict(receiver.receive(version, 5)))
    assert len(segments(plan)) == 4
    held.clear()
    sender.send(5, weights(5), 5)
    assert len(segments(plan)) == 2


def test_one_view_is_enough_to_keep_a_segment(plan: Plan, sender: ShmSender) -> None:
    sender.send(1, weights(1), 5)
    row = dict(ShmReceiver(plan, 0).receive(1, 5))["b"][7, 3:5]
    for version in (2, 3, 4):
        sender.send(version, weights(version), 5)
    assert row.tolist() == [1.0, 1.0]


def test_a_version_that_is_gone_is_named_with_what_is_there(plan: Plan, sender: ShmSender) -> None:
    for version in (1, 2, 3):
        sender.send(version, weights(version), 5)
    with pytest.raises(TransferFailed, match=r"did not finish writing version 1 .*\(there: v00000002, v00000003\)"):
        list(ShmReceiver(plan, 0).receive(1, 0.1))


def test_a_failed_version_can_be_sent_again(plan: Plan, sender: ShmSender) -> None:
    receiver = ShmReceiver(plan, 0)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(lambda: list(receiver.receive(1, 30)))
        with pytest.raises(TransferFailed, match="stopped before 'b'"):
            sender.send(1, weights(1)[:1], 5)
        with pytest.raises(TransferFailed, match="gave up version 1: the trainer stopped before 'b'"):
            waiting.result()
        waiting = pool.submit(lambda: dict(receiver.receive(1, 30)))
        sender.send(1, weights(2), 5)
        assert bool((waiting.result()["b"] == 2).all())
        sender.send(1, weights(3), 5)  # and again, though it was published
        assert bool((dict(receiver.receive(1, 30))["a"] == 3).all())
        assert len(segments(plan)) == 2


def test_a_late_engine_hears_of_a_failure(plan: Plan, sender: ShmSender) -> None:
    with pytest.raises(TransferFailed):
        sender.send(1, [("x", torch.zeros(1))], 5)
    with pytest.raises(TransferFailed, match="gave up version 1: the trainer sent 'x'"):
        list(ShmReceiver(plan, 0).receive(1, 30))


def test_a_sender_out_of_time_says_so(sender: ShmSender) -> None:
    with pytest.raises(TransferFailed, match="did not write version 1 in 0 s"):
        sender.send(1, weights(1), 0)


def test_the_trainer_keeps_its_priority(sender: ShmSender) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    sender.send(1, weights(1), 5)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_two_senders_of_one_plan_are_one_too_many(plan: Plan, sender: ShmSender) -> None:
    sender.send(1, weights(1), 5)
    with pytest.raises(TransferFailed, match="another sender of this plan is alive"):
        ShmSender(plan).send(2, weights(2), 5)
    assert dict(ShmReceiver(plan, 0).receive(1, 5))["a"][0, 0] == 1


def test_full_shared_memory_is_an_error_and_not_a_signal(sender: ShmSender, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(segment.os, "posix_fallocate", full)
    with pytest.raises(TransferFailed, match=r"need 176128 bytes of shared memory.* shared_memory to never"):
        sender.send(1, weights(1), 5)


def test_shared_memory_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan()
    monkeypatch.setattr(shm, "ROOT", tmp_path / "absent")
    with pytest.raises(TransferFailed, match=r"cannot make .*set the resharder's shared_memory to never"):
        ShmSender(plan).send(1, weights(1), 5)


def hold_for_ever(plan: Plan, ready: Any) -> None:
    sender = ShmSender(plan)
    sender.send(1, weights(1), 5)
    ready.set()
    time.sleep(600)


def test_what_a_killed_sender_left_is_removed_by_the_next(plan: Plan, sender: ShmSender) -> None:
    context = multiprocessing.get_context("spawn")
    ready, left = context.Event(), make_plan()
    child = context.Process(target=hold_for_ever, args=(left, ready), daemon=True)
    child.start()
    assert ready.wait(60)
    sender.send(1, weights(1), 5)
    assert plan_folder(left.uid).is_dir()  # its owner lives
    child.kill()
    child.join()
    assert plan_folder(left.uid).is_dir()
    with pytest.raises(TransferFailed, match="sender died before version 2"):
        list(ShmReceiver(left, 0).receive(2, 60))
    other = ShmSender(make_plan())
    other.send(1, weights(1), 5)
    assert not plan_folder(left.uid).exists()
    assert plan_folder(plan.uid).is_dir()
    other.close()
