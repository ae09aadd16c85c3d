"""The engine's asyncio shell: requests come in, one task steps the batcher, weights are swapped between steps."""

from __future__ import annotations

import asyncio

from areal.builtins.moving import HOST
from areal.builtins.transformers_engine.batcher import Batcher
from areal.builtins.transformers_engine.model import CausalModel, commit
from areal.builtins.transformers_engine.options import TransformersEngineOptions
from areal.builtins.transformers_engine.scheduler import Row, Scheduler
from areal.contracts.engine import PauseMode
from areal.contracts.messages import Completion, GenerateRequest
from areal.contracts.requests import check_request
from areal.contracts.specs import EngineContext
from areal.contracts.staging import Staging
from areal.contracts.transfer import Layout, Receipt, Transfer, local_host
from areal.errors import ArealError, WorkerFailed


class TransformersEngine:
    """Continuous batching of a Hugging Face causal language model in this process.

    Invariant: forward passes run only inside the one loop task, each to its end before anything else runs; so after
    `pause` none is running, and weights change between two passes, never within one.
    """

    def __init__(self, options: TransformersEngineOptions, context: EngineContext) -> None:
        self._options = options
        self._context = context
        self._paused = False
        self._is_away = False
        self._closed = False
        self._wake = asyncio.Event()
        self._scheduler = Scheduler(options.max_batch, options.max_prefill_tokens, options.max_kv_tokens)
        self._model: CausalModel | None = None
        self._batcher: Batcher
        self._staging: Staging
        self._loop: asyncio.Task[None] | None = None

    async def start(self) -> Layout:
        """Load the model (version 0); WorkerFailed when the folder cannot be loaded or the model is not supported."""
        accelerator, spec, options = self._context.accelerator, self._context.model, self._options
        self._model = CausalModel(spec, accelerator.name, options)
        self._batcher = Batcher(self._model, self._scheduler)
        expected = self._model.expected()
        has_views = any(tensor.is_meta for tensor in expected.values())
        self._staging = Staging(self._context.name, expected, self._model.device if has_views else "")
        self._loop = asyncio.create_task(self._run(), name=f"{self._context.name} loop")
        return Layout(host=local_host(), collective=accelerator.collective, dtype=spec.dtype)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return the completion of one request; ArealError for one that the model cannot take."""
        model = self._running_model()
        check_request(request, self._context.name, num_positions=model.max_tokens, vocab_size=model.vocab_size)
        stops = model.stop_ids.union(request.sampling.stop_token_ids)
        row = Row(request, stops, asyncio.get_running_loop().create_future())
        if row.limit == 0:
            row.finish("length")
            return await row.future
        put = self._scheduler.waiting.appendleft if request.urgent else self._scheduler.waiting.append
        put(row)
        self._wake.set()
        try:
            return await row.future
        except asyncio.CancelledError:
            if self._model is not None:
                self._batcher.drop(row)
            raise

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop stepping; ``abort`` returns the requests that have begun, those still queued wait for `resume`."""
        self._paused = True
        if mode == "abort" and self._model is not None:
            self._batcher.interrupt()

    async def resume(self) -> None:
        """Go on stepping."""
        self._paused = False
        self._wake.set()

    async def offload(self) -> None:
        """Move weights and cache to the host's memory; WorkerFailed unless paused."""
        model = self._running_model()
        if not self._paused:
            raise WorkerFailed(
                f"engine {self._context.name!r} cannot give its memory back while it runs; pause it first"
            )
        self._is_away = True
        self._batcher.forget_batch()
        model.move(HOST)

    async def onload(self) -> None:
        """Move weights and cache back to the device."""
        model = self._running_model()
        model.move(model.device)
        self._is_away = False
        self._wake.set()

    async def receive(self, transfer: Transfer) -> Receipt:
        """Stage, commit or roll back a weight update; TransferFailed leaves the running weights as they are."""
        model = self._running_model()
        if transfer.phase == "stage":
            return await self._staging.stage(transfer)
        if transfer.phase == "commit":
            commit(model.parameters(), self._staging.take(transfer.version))
            self._batcher.version = transfer.version
            if self._options.kv_on_update == "recompute":
                self._batcher.recompute()
        else:
            self._staging.drop()
        return Receipt(version=transfer.version, checksums={})

    async def close(self) -> None:
        """Stop the loop, return all requests as ``interrupted``, free model and cache."""
        if self._closed:
            return
        self._closed = True
        if self._model is None:
            return
        self._wake.set()
        if self._loop is not None:
            await self._loop
        self._staging.close()
        self._model = None
        del self._batcher

    def load(self) -> dict[str, float]:
        """Return ``running``, ``waiting``, ``kv_usage`` (0..1), ``tokens_total``, ``steps_total``, ``version``."""
        started = self._model is not None
        return {
            "running": len(self._scheduler.running),
            "waiting": len(self._scheduler.waiting),
            "kv_usage": self._scheduler.kv_usage,
            "tokens_total": self._batcher.num_tokens if started else 0,
            "steps_total": self._batcher.num_steps if started else 0,
            "version": self._batcher.version if started else 0,
        }

    async def _run(self) -> None:
        try:
            while not self._closed:
                if self._paused or self._is_away or not self._scheduler.busy:
                    self._wake.clear()
                    await self._wake.wait()
                else:
                    self._step()
                # The one turn that others get: requests that arrive together are admitted together.
                await asyncio.sleep(0)
        finally:
            self._batcher.interrupt()
            while self._scheduler.waiting:
                self._scheduler.waiting.popleft().finish("interrupted")

    def _step(self) -> None:
        try:
            self._batcher.step()
        except Exception as error:
            name, what = self._context.name, str(error) if isinstance(error, ArealError) else _describe(error)
            num_rows = len(self._scheduler.running)
            self._batcher.fail(ArealError(f"engine {name!r} failed in a step of {num_rows} requests: {what}"))

    def _running_model(self) -> CausalModel:
        if self._closed or self._model is None:
            state = "closed" if self._closed else "not started"
            raise WorkerFailed(f"engine {self._context.name!r} is {state}; it takes no requests")
        return self._model


def _describe(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
