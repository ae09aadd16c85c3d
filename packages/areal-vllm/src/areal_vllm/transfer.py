"""AReaL's way of loading, behind vLLM's own weight transfer API (vLLM 0.25.1 and newer)."""

# pyright: reportMissingImports=false
# vLLM has an environment of its own.
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from areal_vllm.weights import tensors_of


@dataclass
class NothingToOpen(WeightTransferInitInfo):
    """Invariant: empty, because the group with the trainer belongs to the resharder's receiver."""


@dataclass
class Staged(WeightTransferUpdateInfo):
    """A whole version. Invariant: exactly one of the two is given."""

    tensors: Mapping[str, Tensor] | None = None
    """By HF name, in this process."""
    path: str | None = None
    """A file that torch saved, which this host sees."""


class StagedWeights(WeightTransferEngine[NothingToOpen, Staged]):
    """Invariant: between `start_weight_update` and `finish_weight_update` the model must not run."""

    init_info_cls = NothingToOpen
    update_info_cls = Staged

    def init_transfer_engine(self, init_info: NothingToOpen) -> None:
        """Nothing to open."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Staged) -> None:
        weights = tensors_of({"tensors": update_info.tensors, "path": update_info.path})
        self.model.load_weights(iter(weights.items()))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing to release."""

    @staticmethod
    def trainer_send_weights(*_: Any, **__: Any) -> None:
        """Abstract in vLLM up to 0.28; AReaL's trainer sends by a resharder."""
        raise NotImplementedError("weights are sent by AReaL's resharders, never by this class")
