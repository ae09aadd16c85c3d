"""The receiving end of a weight update, for every engine: tensors arrive beside the running weights, are checked
against what the engine holds, and wait for the commit.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from areal.contracts.messages import Version
from areal.contracts.resharder import Interrupts, Lasting, Receiver
from areal.contracts.transfer import Layout, Receipt, TensorSpec, Transfer, checksum, piece_name, pieces_of
from areal.errors import TransferFailed

if TYPE_CHECKING:
    from torch import Tensor

_GRACE_S = 2.0
"""A receiver keeps the deadline itself and says why it failed; only one that does not is cut off after this."""


class Staging:
    """Invariant: what `take` returns is complete, and was received for exactly that version.

    At most one receiver is open. It belongs to the plan with its uid; another plan closes it.
    """

    def __init__(self, name: str, parameters: Mapping[str, Tensor], device: str = "") -> None:
        """`parameters`: what the engine holds, by HF name; tied names share one tensor, which may be a meta tensor.

        `device`: where staged tensors wait; empty: each on its parameter's device.
        """
        self._name = name
        self._parameters = parameters
        self._device = device
        self._staged: dict[str, Tensor] = {}
        self._version: Version | None = None
        self._attempt = object()
        self._receiver: Receiver | None = None
        self._uid = ""
        self._lock = threading.Lock()

    async def stage(self, transfer: Transfer) -> Receipt:
        """Receive all tensors in a thread, so that generation goes on; TransferFailed leaves nothing staged."""
        self.drop()
        attempt = self._attempt
        started = time.monotonic()
        try:
            async with asyncio.timeout(transfer.deadline_s + _GRACE_S):
                staged, checksums = await asyncio.to_thread(self._receive, transfer, attempt)
        except TimeoutError:
            self.close()
            raise TransferFailed(
                f"engine {self._name!r} did not receive version {transfer.version} within {transfer.deadline_s:g} s"
            ) from None
        if attempt is not self._attempt:
            raise TransferFailed(f"engine {self._name!r} was told to forget version {transfer.version} meanwhile")
        self._staged, self._version = staged, transfer.version
        num_bytes = sum(tensor.nbytes for tensor in staged.values())
        return Receipt(
            version=transfer.version,
            checksums=checksums,
            num_bytes=num_bytes,
            seconds=time.monotonic() - started,
        )

    def take(self, version: Version) -> dict[str, Tensor]:
        """Return the staged tensors of `version` and forget them; TransferFailed if that is not what is staged."""
        if version != self._version:
            there = "nothing" if self._version is None else f"version {self._version}"
            raise TransferFailed(f"engine {self._name!r} cannot commit version {version}: {there} is staged")
        staged = self._staged
        self.drop()
        return staged

    def drop(self) -> None:
        """Forget what is staged or on its way."""
        self._attempt = object()
        self._staged, self._version = {}, None
        if isinstance(self._receiver, Interrupts):
            self._receiver.interrupt()

    def close(self) -> None:
        """Forget everything and close the receiver."""
        self.drop()
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    def _receive(self, transfer: Transfer, attempt: object) -> tuple[dict[str, Tensor], dict[str, int]]:
        end = time.monotonic() + transfer.deadline_s
        if not self._lock.acquire(timeout=transfer.deadline_s):
            raise TransferFailed(f"engine {self._name!r} is still busy with an earlier transfer")
        try:
            return self._collect(transfer, attempt, end)
        except TransferFailed:
            raise
        except Exception as error:
            raise TransferFailed(
                f"engine {self._name!r} could not receive version {transfer.version}: {type(error).__name__}: {error}"
            ) from error
        finally:
            self._lock.release()

    def _collect(self, transfer: Transfer, attempt: object, end: float) -> tuple[dict[str, Tensor], dict[str, int]]:
        staged: dict[str, Tensor] = {}
        checksums: dict[str, int] = {}
        owners: dict[int, str] = {}
        receiver = self._receiver_of(transfer)
        boxes = _Boxes(transfer.plan.source)
        copies = not isinstance(receiver, Lasting)  # who does not say so may use its memory again
        arriving = receiver.receive(transfer.version, end - time.monotonic())
        self._go_on_with(attempt, transfer.version, end)  # from here on `drop` can interrupt it
        for name, tensor in arriving:
            parameter = self._check(name, tensor)
            self._go_on_with(attempt, transfer.version, end)
            checksums |= boxes.checksums(name, tensor)
            first = owners.setdefault(id(parameter), name)
            if first != name and checksum(tensor) != checksum(staged[first]):
                raise TransferFailed(f"{first!r} and {name!r} are one tied parameter here but arrived with two values")
            staged[first] = tensor.to(self._device or parameter.device, copy=copies)
        missing = {id(parameter): name for name, parameter in self._parameters.items() if id(parameter) not in owners}
        if missing:
            names = sorted(missing.values())
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise TransferFailed(f"version {transfer.version} arrived without {names[0]!r}{more}")
        return staged, checksums

    def _go_on_with(self, attempt: object, version: Version, end: float) -> None:
        if attempt is not self._attempt or time.monotonic() > end:
            raise TransferFailed(f"engine {self._name!r} gave up version {version} before it was whole")

    def _check(self, name: str, tensor: Tensor) -> Tensor:
        parameter = self._parameters.get(name)
        if parameter is None:
            raise TransferFailed(f"engine {self._name!r} has no parameter {name!r}")
        if tensor.shape != parameter.shape:
            raise TransferFailed(
                f"{name!r} arrived as {_shape(tensor)}, engine {self._name!r} holds {_shape(parameter)}"
            )
        if tensor.dtype != parameter.dtype:
            raise TransferFailed(f"{name!r} arrived as {tensor.dtype}, engine {self._name!r} holds {parameter.dtype}")
        return parameter

    def _receiver_of(self, transfer: Transfer) -> Receiver:
        if self._receiver is not None and self._uid == transfer.plan.uid:
            return self._receiver
        old, self._receiver = self._receiver, None
        if old is not None:
            old.close()
        resharder = transfer.resharder.load()(transfer.options, "")
        receiver: Receiver = resharder.receiver(transfer.plan, transfer.member)
        self._receiver, self._uid = receiver, transfer.plan.uid
        return receiver


class _Boxes:
    """What the sender's ranks send of each tensor. Invariant: a tensor that no rank names is one piece."""

    def __init__(self, source: Layout) -> None:
        self._pieces: dict[str, dict[str, tuple[slice, ...]]] = {}
        for rank in range(max(1, len(source.pieces))):
            for piece in pieces_of(source, rank):
                spec: TensorSpec = source.tensors[piece.tensor]
                self._pieces.setdefault(spec.name, {})[piece_name(spec, piece)] = piece.box

    def checksums(self, name: str, tensor: Tensor) -> dict[str, int]:
        """Return the CRC-32 of each piece of a tensor that arrived, by `piece_name`."""
        pieces = self._pieces.get(name, {name: ()})
        return {key: checksum(tensor[box]) for key, box in pieces.items()}


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))
