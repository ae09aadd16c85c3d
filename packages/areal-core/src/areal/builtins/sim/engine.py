"""The engine ``sim``: answers come when a real engine's would, and nothing is computed."""

from __future__ import annotations

import asyncio
import json
from bisect import bisect_right
from pathlib import Path
from typing import TypeVar

from pydantic import Field

from areal.builtins.sim.batching import Batching, Cost, Slot
from areal.builtins.sim.resharder import receive_s
from areal.contracts.engine import PauseMode
from areal.contracts.messages import Completion, FinishReason, GenerateRequest, Version
from areal.contracts.options import Options
from areal.contracts.requests import check_request
from areal.contracts.specs import EngineContext
from areal.contracts.transfer import Layout, Receipt, Transfer
from areal.errors import TransferFailed, WorkerFailed

COLLECTIVE = "sim"
"""What both ends of a simulated transfer say they speak."""
T = TypeVar("T")
ANY_ID = 2**31
LETTERS = tuple(range(4, 60))
"""Ids of made-up tokens: printable in the tiny model's vocabulary, and in every larger one."""


class SimEngineOptions(Options):
    """Invariant: the defaults are those of a dense model of about 7 billion parameters in bfloat16 on one H100.

    A decode step reads 14 GB of weights at 3.35 TB/s (4 ms) and launches its kernels; each running request adds its
    own keys and values (some 4 k tokens of 0.1 MB or less). A prompt token costs 14 GFLOP at about 400 TFLOP/s.
    """

    step_s: float = Field(default=0.010, gt=0)
    """Seconds of a decode step, whatever runs."""
    step_s_per_request: float = Field(default=0.0001, ge=0)
    """Seconds that each running request adds to a decode step."""
    prefill_s_per_token: float = Field(default=0.000035, ge=0)
    """Seconds for each prompt token; the batch's decoding stands still meanwhile."""
    max_running: int = Field(default=128, ge=1)
    """Requests that run at the same time; further ones wait."""
    max_tokens: int = Field(default=131_072, ge=1)
    """Longest sequence, prompt and answer together."""
    start_s: float = Field(default=60.0, ge=0)
    """Seconds to load the model."""
    swap_s: float = Field(default=0.3, ge=0)
    """Seconds of a commit, in which nothing is generated."""
    record: str = ""
    """A JSON lines file to which each question about the load adds a line, time and totals; empty: none."""


class SimEngine:
    """One replica that only takes time, on the event loop's clock.

    Invariant: a token's version is that of the weights at the moment it was made; times are those of `Batching`.

    Of the conformance kit only the cases on load, pausing and closing make sense, and the tests of this package have
    them: the others compare logprobs with transformers' and bring weights through files, and here are neither.
    """

    def __init__(self, options: SimEngineOptions, context: EngineContext) -> None:
        self._options = options
        self._name = context.name
        self._dtype = context.model.dtype
        self._batching = Batching(
            Cost(
                step_s=options.step_s,
                step_s_per_request=options.step_s_per_request,
                prefill_s_per_token=options.prefill_s_per_token,
                max_running=options.max_running,
            )
        )
        self._changes: list[tuple[int, Version]] = [(0, 0)]
        """(decode steps before it, version): when the weights changed, in order."""
        self._staged: Version | None = None
        self._state = "not started"
        self._timer: asyncio.TimerHandle | None = None
        self._passed = asyncio.Event()
        self._began = 0.0

    async def start(self) -> Layout:
        self._clock = asyncio.get_running_loop()
        await asyncio.sleep(self._options.start_s)
        self._state, self._began = "", self._clock.time()
        return Layout(host=COLLECTIVE, collective=COLLECTIVE, dtype=self._dtype)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return as many made-up tokens as are asked for; ArealError for a request that does not fit."""
        self._check_serves()
        check_request(request, self._name, num_positions=self._options.max_tokens, vocab_size=ANY_ID)
        limit = request.sampling.max_new_tokens
        if limit == 0:
            return self._completion(request, Slot(num_prompt=0, limit=0, first=0), "length")
        answer: asyncio.Future[FinishReason] = self._clock.create_future()
        slot = Slot(num_prompt=len(request.prompt_ids), limit=limit, owner=answer)
        self._batching.add(slot, self._clock.time(), first=request.urgent)
        self._set_timer()
        try:
            reason = await answer
        except asyncio.CancelledError:
            self._batching.leave(slot, self._clock.time())
            self._set_timer()
            raise
        return self._completion(request, slot, reason)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Return at the end of the pass that runs; ``abort`` interrupts what runs, what waits goes on waiting."""
        self._check_serves()
        self._batching.pause(self._clock.time())
        self._set_timer()
        while not self._batching.stopped and self._batching.pausing and not self._state:
            self._passed.clear()
            await self._passed.wait()  # a pass ends by the clock, and `resume` and `close` end this too
        if mode == "abort" and self._batching.stopped:
            self._answer(self._batching.interrupt(self._clock.time()), "interrupted")

    async def resume(self) -> None:
        self._check_serves()
        self._batching.resume(self._clock.time())
        self._passed.set()
        self._set_timer()

    async def receive(self, transfer: Transfer) -> Receipt:
        """Stage a version's number, make it the running one, or forget it. TransferFailed."""
        self._check_serves()
        version = transfer.version
        if transfer.phase == "stage":
            self._staged = None
            seconds, checksums = receive_s(transfer, self._name)
            await asyncio.sleep(seconds)
            self._staged = version
            return Receipt(version=version, checksums=checksums, seconds=seconds)
        if transfer.phase == "commit":
            await self._commit(version)
        else:
            self._staged = None
        return Receipt(version=version, checksums={})

    async def _commit(self, version: Version) -> None:
        if self._staged != version:
            there = "nothing" if self._staged is None else f"version {self._staged}"
            raise TransferFailed(f"engine {self._name!r} cannot commit version {version}: {there} is staged")
        if not self._batching.stopped:
            raise TransferFailed(f"engine {self._name!r} cannot commit version {version} while it runs; pause it first")
        await asyncio.sleep(self._options.swap_s)
        self._staged = None
        needed = bisect_right(self._changes, (self._batching.first_needed, ANY_ID)) - 1
        self._changes = [*self._changes[needed:], (self._batching.steps(self._clock.time()), version)]

    async def close(self) -> None:
        """Return everything as ``interrupted``."""
        if self._state == "":
            now = self._clock.time()
            self._answer(self._batching.interrupt(now) + self._batching.take_waiting(), "interrupted")
        self._state = "closed"
        self._passed.set()
        if self._timer is not None:
            self._timer.cancel()

    def load(self) -> dict[str, float]:
        """Return how busy it is; ``kv_usage`` is of its places.

        Of the time since it started: ``busy_share`` with at least one running request, ``working_share`` without the
        pauses, in which those stand still.
        """
        running, waiting = self._batching.sizes
        now = self._clock.time() if self._state == "" else self._began
        (worked_s, stood_s), tokens = self._batching.busy_s(now), self._batching.tokens(now)
        age_s = now - self._began
        if self._options.record:
            line = {"name": self._name, "began": self._began, "time": now, "worked_s": worked_s, "stood_s": stood_s}
            with Path(self._options.record).open("a", encoding="utf-8") as file:
                file.write(json.dumps({**line, "tokens": tokens}) + "\n")
        return {
            "running": running,
            "waiting": waiting,
            "kv_usage": running / self._options.max_running,
            "busy_share": (worked_s + stood_s) / age_s if age_s > 0 else 0.0,
            "working_share": worked_s / age_s if age_s > 0 else 0.0,
            "tokens_total": tokens,
            "version": self._changes[-1][1],
        }

    def _set_timer(self) -> None:
        due = self._batching.due
        if self._timer is not None:
            if self._timer.when() == due and not self._timer.cancelled():
                return
            self._timer.cancel()
        # At least one turn of the loop later: requests of one moment are admitted together.
        self._timer = None if due is None else self._clock.call_at(due, self._pass)

    def _pass(self) -> None:
        self._timer = None
        self._answer(self._batching.advance(), "length")
        if self._batching.stopped:
            self._passed.set()
        self._set_timer()

    def _answer(self, slots: list[Slot], reason: FinishReason) -> None:
        for slot in slots:
            if not slot.owner.done():
                slot.owner.set_result(reason)

    def _completion(self, request: GenerateRequest, slot: Slot, reason: FinishReason) -> Completion:
        num = slot.num_tokens
        return Completion(
            uid=request.uid,
            prompt_ids=request.prompt_ids,
            token_ids=_made_up(LETTERS, request.seed, num),
            logprobs=_made_up(LOGPROBS, request.seed, num),
            versions=self._versions(slot.first, num),
            finish_reason=reason,
        )

    def _versions(self, first: int, num: int) -> tuple[Version, ...]:
        """Return the versions of `num` tokens of which the first was made after `first` decode steps."""
        place = bisect_right(self._changes, (first, ANY_ID)) - 1
        versions: tuple[Version, ...] = ()
        for index in range(max(place, 0), len(self._changes)):
            _, version = self._changes[index]
            end = self._changes[index + 1][0] if index + 1 < len(self._changes) else first + num
            versions += (version,) * (min(end, first + num) - first - len(versions))
        return versions

    def _check_serves(self) -> None:
        if self._state:
            raise WorkerFailed(f"engine {self._name!r} is {self._state}; it takes no requests")


LOGPROBS = tuple(-0.05 * (1 + 7 * number % 40) for number in range(len(LETTERS)))


def _made_up(values: tuple[T, ...], seed: int, num: int) -> tuple[T, ...]:
    """Return `num` of the values, those from place `seed` on, round and round."""
    first = seed % len(values)
    return (values * (1 + (first + num) // len(values)))[first : first + num]
