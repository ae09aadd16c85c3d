"""Whether a family of models without a plan computes packed rows as it should; every rank finds the same."""

from __future__ import annotations

from typing import cast

import torch
from torch.distributed.fsdp import FSDPModule

from areal.algorithms.update import probe
from areal.algorithms.update.module import AMP_DTYPES
from areal.algorithms.update.packing import pack
from areal.contracts.specs import BackendContext
from areal.errors import WorkerFailed, first_line
from areal_fsdp2.limits import PLANNED
from areal_fsdp2.model import PackedModel, PolicyModel

LOW_PRECISION = 0.3
"""Logprobs of a bfloat16 or float16 pass are off by less, from rounding alone."""


@torch.no_grad()
def check_packing(model: PackedModel, context: BackendContext, device: torch.device) -> None:
    """Refuse a model whose logprobs of packed rows are not those of its own forward pass; WorkerFailed.

    A critic's layers are a policy's, and its policy is asked.
    """
    if model.config.model_type in PLANNED or not isinstance(model, PolicyModel):
        return
    rows = probe.probe_rows(model.config.vocab_size)
    module, amp = model.module, context.training.amp
    attention = cast(str, module.config._attn_implementation)
    try:
        packed, _ = model(pack(rows, range(len(rows)), device), 1.0)
        # After its forward pass the root's weights are whole until they are resharded.
        module.set_attn_implementation("eager")
        with torch.autocast(device.type, AMP_DTYPES[amp.dtype], enabled=amp.enabled):
            own = probe.own_logprobs(module, rows, device)
        complaint = probe.complaint(own, packed, LOW_PRECISION if amp.enabled else probe.TOLERANCE)
    except probe.ERRORS as error:
        complaint = f"{type(error).__name__}: {first_line(error)}"
    module.set_attn_implementation(attention)
    cast(FSDPModule, model).reshard()
    if complaint:
        raise WorkerFailed(
            f"the backend 'fsdp2' cannot train the model in {context.model.path!r} ({complaint}); use a decoder with "
            "plain causal or sliding-window attention, or another backend"
        )
