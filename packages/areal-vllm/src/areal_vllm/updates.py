"""Weight updates of one vLLM engine: staged beside the running weights, committed whole between two steps."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from areal.contracts.staging import Staging
from areal.contracts.transfer import Adapter, Plan, Receipt, Transfer
from areal.errors import ArealError, TransferFailed
from areal_vllm import calls
from areal_vllm.adapters import Adapters
from areal_vllm.handover import Handover
from areal_vllm.options import VllmOptions
from areal_vllm.stepper import Stepper


class Updates:
    """Invariant: vLLM runs with one whole version, or makes no step ever again and says why."""

    def __init__(self, name: str, options: VllmOptions, num_ranks: int) -> None:
        self._name = name
        self._options = options
        self._num_ranks = num_ranks
        self._expected: Mapping[str, Tensor] = {}
        self._staging: Staging | None = None
        self._staging_for: Adapter | None = None
        self._handover = Handover(name, num_ranks)
        self._adapters = Adapters()
        self._checked = False

    def expect(self, held: Mapping[str, Tensor]) -> None:
        """What a full update must bring: meta tensors by HF name, tied names sharing one."""
        self._expected = held

    async def stage(self, transfer: Transfer) -> Receipt:
        """Receive a version and check it, while generation goes on. TransferFailed leaves nothing staged."""
        self.drop()
        adapter = transfer.plan.source.adapter
        staging = self._staging_of(transfer.plan)
        receipt = await staging.stage(transfer)
        weights = staging.take(transfer.version)
        if adapter is None and self._num_ranks > 1:
            await asyncio.to_thread(self._handover.put, transfer.version, weights)
        else:
            self._handover.keep(transfer.version, weights)
        return receipt

    def commit(self, stepper: Stepper, transfer: Transfer) -> None:
        """Make the staged version the running one; a command of the stepper. TransferFailed."""
        update, adapter = self._handover.take(transfer.version), transfer.plan.source.adapter
        try:
            if adapter is not None:
                self._commit_adapter(stepper, adapter, update, transfer)
            else:
                self._commit_weights(stepper, update, transfer)
        finally:
            self._handover.drop()

    def drop(self) -> None:
        """Forget what is staged or on its way."""
        self._handover.drop()
        if self._staging is not None:
            self._staging.drop()

    def close(self) -> None:
        self._handover.drop()
        if self._staging is not None:
            self._staging.close()

    def _staging_of(self, plan: Plan) -> Staging:
        adapter = plan.source.adapter
        if self._staging is None or adapter != self._staging_for:
            if self._staging is not None:
                self._staging.close()
            expected = self._expected if adapter is None else _adapter_tensors(plan)
            self._staging, self._staging_for = Staging(self._name, expected, "cpu"), adapter
        return self._staging

    def _commit_weights(self, stepper: Stepper, update: Mapping[str, Any], transfer: Transfer) -> None:
        engine, version = stepper.engine, transfer.version
        try:
            self._adapters.remove(engine)
            stepper.serve(None)
            calls.update_weights(engine, update, version, transfer.deadline_s)
            self._check(engine, update, transfer.deadline_s)
            self._renew_cache(stepper)
        except Exception as error:
            raise self._broken(stepper, version, error) from error
        stepper.base_version = version

    def _commit_adapter(
        self, stepper: Stepper, adapter: Adapter, update: Mapping[str, Any], transfer: Transfer
    ) -> None:
        try:
            self._adapters.commit(stepper.engine, adapter, update["tensors"])
        except TransferFailed as error:
            if self._num_ranks == 1:
                raise  # the one rank read the whole adapter before it gave up the old one
            raise self._broken(stepper, transfer.version, error) from error
        stepper.serve(self._adapters.request)
        stepper.adapter_version = transfer.version
        self._renew_cache(stepper)

    def _check(self, engine: Any, update: Mapping[str, Any], deadline_s: float) -> None:
        wanted = self._options.check_loaded
        if wanted == "never" or (wanted == "first" and self._checked):
            return
        compared, different = calls.compare_weights(engine, update, deadline_s)
        if different:
            raise TransferFailed(
                f"{len(different)} of {compared} tensors that vLLM runs with are not what was sent, the first is "
                f"{different[0]!r}"
            )
        self._checked = True

    def _renew_cache(self, stepper: Stepper) -> None:
        """New requests carry the version in their cache key, so that only running ones still see older keys."""
        if self._options.kv_on_update == "recompute":
            stepper.forget_cache()

    def _broken(self, stepper: Stepper, version: int, error: Exception) -> TransferFailed:
        said = str(error) if isinstance(error, ArealError) else f"{type(error).__name__}: {error}"
        reason = f"engine {self._name!r} could not load version {version} and stops: {' '.join(said.split())}"
        stepper.fail(reason)
        return TransferFailed(reason)


def _adapter_tensors(plan: Plan) -> dict[str, Tensor]:
    """Return what the sender says its adapter consists of, as meta tensors."""
    return {
        spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
        for spec in plan.source.tensors
    }
