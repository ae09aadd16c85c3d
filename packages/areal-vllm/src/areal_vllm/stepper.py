"""vLLM's engine in a thread of its own: commands run between two steps, so that weights change between tokens."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from areal.contracts.messages import Version
from areal.errors import ArealError, WorkerDied
from areal_vllm import calls
from areal_vllm.admission import Admission
from areal_vllm.commands import Commands
from areal_vllm.running import Running, answer


@dataclass(slots=True)
class Counters:
    """What the steps came to. Invariant: written by the stepper's thread only, after each step."""

    num_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed, because the prefix cache had them."""
    num_steps: int = 0
    num_preemptions: int = 0
    num_queued: int = 0
    """Requests that vLLM has and did not run in the last step."""
    kv_usage: float = 0.0


class Stepper:
    """Invariant: everything that touches vLLM's engine runs in one thread; a command never meets a running step."""

    def __init__(self, name: str, make: Callable[[], Any], *, adaptive: bool) -> None:
        self.commands = Commands()
        self.counters = Counters()
        self.base_version: Version = 0
        """The weights of requests without adapter."""
        self.adapter_version: Version = 0
        """The weights of requests with the adapter, which is replaced in place."""
        self.engine: Any = None
        """vLLM's; for commands only."""
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why it can go on no more."""
        self._name = name
        self._make = make
        self._adaptive = adaptive
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Running] = deque()
        self._inside: dict[str, Running] = {}
        self._admission = Admission(1, adaptive=adaptive)
        self._preempted: dict[str, int] = {}
        self._adapter: Any = None
        self._paused = False
        self._broken = ""
        self._death = ""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"{name} steps", daemon=True)

    async def start(self) -> None:
        """Make the engine in the thread; raises what `make` raises."""
        self._thread.start()

        def made() -> None:
            self.engine = self._make()
            self._admission = Admission(calls.most_running(self.engine), adaptive=self._adaptive)
            calls.watch_ranks(self.engine, self._rank_died)

        await self.commands.call(made)

    async def close(self) -> None:
        """End the thread and vLLM; requests return as ``interrupted``."""
        self._closing = True
        self.commands.end()
        await asyncio.to_thread(self._thread.join)

    def load(self) -> dict[str, float]:
        """Return how busy the engine is; from any thread, without waiting for a step."""
        counters, inside = self.counters, len(self._inside)
        queued = min(counters.num_queued, inside)
        return {
            "running": inside - queued,
            "waiting": len(self._waiting) + queued,
            "kv_usage": counters.kv_usage if inside else 0.0,
            "tokens_total": counters.num_tokens,
            "cached_tokens_total": counters.num_cached_tokens,
            "steps_total": counters.num_steps,
            "preemptions_total": counters.num_preemptions,
            "limit": self._admission.limit,
            "version": max(self.base_version, self.adapter_version),
        }

    # Commands: they run in the thread.

    def begin(self, running: Running) -> None:
        """Take a request; vLLM gets it as soon as there is room."""
        if self._broken:
            running.fail(WorkerDied(self._broken))
        elif running.request.urgent:
            self._waiting.appendleft(running)
        else:
            self._waiting.append(running)

    def forget(self, running: Running) -> None:
        """Drop a request whose caller has gone away."""
        if running in self._waiting:
            self._waiting.remove(running)
        elif self._inside.pop(running.uid, None):
            self.engine.abort_request([running.uid])

    def pause(self, *, abort: bool) -> None:
        """Make no step until `resume`; with `abort`, take every request that vLLM has back with its tokens."""
        self._paused = True
        if abort and self._inside:
            self.engine.abort_request(list(self._inside))
            self._return_all()

    def resume(self) -> None:
        self._paused = False

    def serve(self, adapter: Any) -> None:
        """Let new requests use this adapter (vLLM's LoRARequest), or none."""
        self._adapter = adapter

    def forget_cache(self) -> None:
        """Have running requests computed anew; that vLLM calls it preemption is no sign of pressure."""
        calls.forget_cache(self.engine)
        self._preempted = calls.preemptions(self.engine)

    def fail(self, reason: str) -> None:
        """Make no step ever again: what vLLM holds may be half of two versions."""
        self._broken = reason
        error = WorkerDied(reason)
        for running in (*self._inside.values(), *self._waiting):
            running.fail(error)
        self._inside.clear()
        self._waiting.clear()
        answer(self._loop, self.ended, reason, None)

    def _rank_died(self, reason: str) -> None:
        """Called in a thread of its own, while the step that waits for the rank may take seconds to give up."""
        if not self._closing:
            self._death = f"vLLM of engine {self._name!r} stopped: {reason}"
            answer(self._loop, self.ended, self._death, None)
            self.commands.post(lambda: self._broken or self.fail(self._death))

    # The thread.

    def _run(self) -> None:
        while self.commands.obey(wait=not self._has_work()):
            if self._has_work():
                self._step()
        self._return_all()
        while self._waiting:
            self._waiting.popleft().finish("interrupted")
        if self.engine is not None:
            try:
                calls.shut_down(self.engine)
            except Exception:
                traceback.print_exc()
            self.engine = None

    def _has_work(self) -> bool:
        return bool(self._inside or self._waiting) and not self._paused

    def _step(self) -> None:
        try:
            self._admit()
            outputs = self.engine.step()
        except Exception as error:
            traceback.print_exc()
            said = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
            num_requests = len(self._inside)
            self.fail(
                self._death or f"vLLM of engine {self._name!r} failed in a step of {num_requests} requests: {said}"
            )
            return
        for output in outputs:
            self._take(output)
        self._observe()

    def _admit(self) -> None:
        while self._waiting and len(self._inside) < self._admission.limit:
            running = self._waiting.popleft()
            running.adapter = self._adapter
            prompt = calls.prompt(running.request.prompt_ids, self._version_of(running))
            try:
                self.engine.add_request(running.uid, prompt, running.params, lora_request=running.adapter)
            except Exception as error:  # vLLM has a class of its own for every kind of refusal
                said = " ".join(str(error).split())
                running.fail(ArealError(f"vLLM does not take the request {running.request.uid!r}: {said}"))
            else:
                self._inside[running.uid] = running

    def _take(self, output: Any) -> None:
        running = self._inside.get(output.request_id)
        if running is None:
            return
        (part,) = output.outputs
        if not running.tokens:
            self.counters.num_cached_tokens += output.num_cached_tokens or 0
        running.add(part, self._version_of(running))
        self.counters.num_tokens += len(part.token_ids)
        if output.finished:
            del self._inside[running.uid]
            running.finish("stop" if part.finish_reason == "stop" else "length")

    def _version_of(self, running: Running) -> Version:
        return self.base_version if running.adapter is None else self.adapter_version

    def _observe(self) -> None:
        running, queued, kv_usage = calls.counts(self.engine)
        preempted = 0
        if queued:
            seen, self._preempted = self._preempted, calls.preemptions(self.engine)
            preempted = sum(number > seen.get(uid, 0) for uid, number in self._preempted.items())
        self._admission.observe(running, queued, preempted)
        counters = self.counters
        counters.num_queued, counters.kv_usage = queued, kv_usage
        counters.num_steps += 1
        counters.num_preemptions += preempted

    def _return_all(self) -> None:
        for running in self._inside.values():
            running.finish("interrupted")
        self._inside.clear()
