"""One call to all ranks of the trainer: what they say together, and who is to blame when they say nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from areal.contracts.cluster import Handle
from areal.contracts.transfer import Receipt
from areal.errors import TrainerLost, TransferFailed, WorkerDied, WorkerFailed

STRAGGLE_S = 30.0
"""For the others to end a call in which a rank has failed: they may be waiting for it in a collective, or for a death
that the cluster has not noticed yet."""


class RankLost(Exception):
    """A rank that cannot go on, and the whole group with it. Invariant: `name` is the one that is to blame."""

    def __init__(self, name: str, reason: str, error: BaseException | None = None) -> None:
        super().__init__(reason)
        self.name = name
        self.reason = reason
        self.error = error
        """What a rank said of the work itself, where that is what the caller should hear."""


async def ask_all(ranks: Mapping[str, Handle], method: str, args: Sequence[Any], deadline_s: float | None) -> Any:
    """Call a method of all ranks at once and return the answer of the first, or one receipt of all receipts.

    Once all ranks have ended the call, raises what the rank raised that failed first. RankLost as soon as a rank has
    died, or when one is silent at the deadline, or STRAGGLE_S after another has failed; it may still be at work then.
    """
    calls: dict[asyncio.Future[Any], str] = {
        asyncio.ensure_future(handle.call(method, *args)): name for name, handle in ranks.items()
    }
    try:
        await _ended(calls, ranks, method, deadline_s)
        return _joined([call.result() for call in calls])
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def _ended(
    calls: Mapping[asyncio.Future[Any], str], ranks: Mapping[str, Handle], method: str, deadline_s: float | None
) -> None:
    """Wait until all ranks have ended their call; raises the first failure, see `ask_all`."""
    loop = asyncio.get_running_loop()
    give_up = float("inf") if deadline_s is None else loop.time() + deadline_s
    first: BaseException | None = None
    silent = set(calls)
    while silent:
        left_s = None if give_up == float("inf") else max(0.0, give_up - loop.time())
        done, silent = await asyncio.wait(silent, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        names = [name for call, name in calls.items() if call in silent]
        if not done:
            raise _silence(names, method, deadline_s, first)
        failed = [(calls[call], error) for call in calls if call in done and (error := call.exception())]
        for name, error in failed:
            if isinstance(error, WorkerDied | TrainerLost):
                raise RankLost(name, str(error)) from error
        if failed and first is None:
            _, first = failed[0]
            give_up = min(give_up, loop.time() + STRAGGLE_S)
            await asyncio.gather(*(_interrupt(ranks[name]) for name in names))
    if first is not None:
        raise first


def _silence(names: Sequence[str], method: str, deadline_s: float | None, first: BaseException | None) -> RankLost:
    who, were = " and ".join(names), "was" if len(names) == 1 else "were"
    if first is None:
        return RankLost(names[0], f"{who} did not answer {method!r} within {deadline_s:g} s and {were} ended")
    reason = f"{first}; {who} did not end {method!r} after that and {were} ended"
    return RankLost(names[0], reason, None if isinstance(first, WorkerFailed) else first)


async def _interrupt(rank: Handle) -> None:
    """Tell a rank that what it sends is in vain; whatever is wrong with it, its call says so as well."""
    with suppress(WorkerFailed):
        await rank.call("interrupt", deadline_s=1.0)


def _joined(answers: Sequence[Any]) -> Any:
    if len(answers) > 1 and isinstance(answers[0], Receipt):
        return merged(answers)
    return answers[0]


def merged(receipts: Sequence[Receipt]) -> Receipt:
    """Return one receipt for what several ranks have sent; TransferFailed when two have sent the same piece."""
    checksums: dict[str, int] = {}
    for receipt in receipts:
        if twice := sorted(checksums.keys() & receipt.checksums.keys()):
            raise TransferFailed(
                f"two trainer ranks sent {twice[0]!r} of version {receipt.version}; the pieces of the backend's layout "
                "must not overlap"
            )
        checksums |= receipt.checksums
    return Receipt(
        version=receipts[0].version,
        checksums=checksums,
        num_bytes=sum(receipt.num_bytes for receipt in receipts),
        seconds=max(receipt.seconds for receipt in receipts),
    )
