"""vLLM behind AReaL's engine contract."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.contracts.engine import PauseMode
from areal.contracts.messages import Completion, GenerateRequest
from areal.contracts.requests import check_request
from areal.contracts.specs import EngineContext
from areal.contracts.transfer import Layout, Receipt, Transfer, local_host
from areal.errors import ConfigError, WorkerFailed
from areal_vllm import environment
from areal_vllm.options import VllmOptions

if TYPE_CHECKING:
    from areal_vllm.stepper import Stepper


class VllmEngine:
    """One replica of vLLM. Invariant: weights change between two steps, so a token's version is that of its step."""

    def __init__(self, options: VllmOptions, context: EngineContext) -> None:
        # Before anything imports vLLM.
        environment.prepare(context.accelerator.name, compiles=options.arguments.get("enforce_eager") is False)
        from areal_vllm import calls
        from areal_vllm.updates import Updates

        calls.check_version()
        self._options = options
        self._context = context
        self._num_ranks = _tensor_parallel(options, context)
        self._updates = Updates(context.name, options, self._num_ranks)
        self._uids = itertools.count()
        self._stops: frozenset[int] = frozenset()
        self._stepper: Stepper | None = None
        self._up = asyncio.Event()
        self._end: asyncio.Future[str]

    async def start(self) -> Layout:
        """Load the model (version 0). WorkerFailed with vLLM's own last sentence, ConfigError for its options."""
        from areal_vllm import calls, checkpoint
        from areal_vllm.stepper import Stepper

        context, spec, options = self._context, self._context.model, self._options

        def make() -> Any:
            return calls.make_engine(
                spec,
                options.arguments,
                tensor_parallel=self._num_ranks,
                device=context.accelerator.name,
                seed=context.seed,
                log_file=str(Path(context.log_dir, f"{context.name}.log")) if context.log_dir else "",
            )

        folder = await asyncio.to_thread(checkpoint.folder_of, spec.path)
        self._updates.expect(checkpoint.held_tensors(folder, spec.dtype))
        self._stops = checkpoint.stop_ids(folder)
        stepper = Stepper(context.name, make, adaptive=options.adaptive_batch)
        try:
            await stepper.start()
        except BaseException:
            await stepper.close()
            raise
        self._stepper, self._end = stepper, stepper.ended
        self._up.set()
        return Layout(
            host=local_host(),
            # With several ranks this process, which receives, has no device of its own.
            collective=context.accelerator.collective if self._num_ranks == 1 else "gloo",
            dtype=spec.dtype,
            num_ranks=self._num_ranks,
            tensor_parallel=self._num_ranks,
            max_adapter_rank=calls.max_adapter_rank(stepper.engine),
        )

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return the completion of one request; ArealError for one that the model cannot take."""
        from areal_vllm import calls
        from areal_vllm.running import Running

        stepper = self._started()
        sampling, vocab_size = request.sampling, calls.vocab_size(stepper.engine)
        check_request(
            request, self._context.name, num_positions=calls.num_positions(stepper.engine), vocab_size=vocab_size
        )
        params = (
            calls.sampling_params(sampling, request.seed, self._stops, vocab_size) if sampling.max_new_tokens else 0
        )
        running = Running(f"{next(self._uids)}/{request.uid}", request, params)
        if not params:
            running.finish("length")
            return await running.future
        stepper.commands.post(lambda: stepper.begin(running))
        try:
            return await running.future
        except asyncio.CancelledError:
            stepper.commands.post(lambda: stepper.forget(running))
            raise

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop stepping; ``abort`` returns the requests that vLLM has, those not begun wait for `resume`."""
        stepper = self._started()
        await stepper.commands.call(lambda: stepper.pause(abort=mode == "abort"))

    async def resume(self) -> None:
        """Go on stepping."""
        stepper = self._started()
        await stepper.commands.call(stepper.resume)

    async def receive(self, transfer: Transfer) -> Receipt:
        """Stage beside the running weights, commit between two steps, or roll back; TransferFailed."""
        stepper = self._started()
        if transfer.phase == "stage":
            return await self._updates.stage(transfer)
        if transfer.phase == "commit":
            await stepper.commands.call(lambda: self._updates.commit(stepper, transfer))
        else:
            self._updates.drop()
        return Receipt(version=transfer.version, checksums={})

    async def ended(self) -> str:
        """Return why vLLM can serve no more: a rank that died, or weights that are half of two versions."""
        await self._up.wait()
        return await asyncio.shield(self._end)

    async def close(self) -> None:
        """End the thread and vLLM; running requests return as ``interrupted``."""
        stepper, self._stepper = self._stepper, None
        if stepper is not None:
            await stepper.close()
        self._updates.close()

    def load(self) -> dict[str, float]:
        """Return ``running``, ``waiting``, ``kv_usage`` (0..1), ``limit``, ``version`` and the totals of tokens, steps
        and preemptions."""
        return self._stepper.load() if self._stepper is not None else {}

    def _started(self) -> Stepper:
        if self._stepper is None:
            raise WorkerFailed(f"engine {self._context.name!r} is not running; it takes no requests")
        return self._stepper


def _tensor_parallel(options: VllmOptions, context: EngineContext) -> int:
    """Return the ranks of a replica: what the options say, or all its devices when the recipe spreads them by tp."""
    if context.parallel == "pp":
        raise ConfigError("'resources.infer.parallel' is pp, which areal-vllm does not support; use tp or dp")
    return options.tensor_parallel_size or (context.devices if context.parallel == "tp" else 1)
