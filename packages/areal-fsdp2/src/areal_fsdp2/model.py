"""The model of one role: a sharded Hugging Face module that computes packed rows, with an LM head or a critic's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel

from areal.algorithms.update.logprobs import head_logprobs, logit_scaling
from areal.algorithms.update.module import AMP_DTYPES, checkpoint_activations
from areal.algorithms.update.packing import Packed
from areal.contracts.specs import AmpSpec, BackendContext, TrainingSpec
from areal.errors import WorkerFailed
from areal_fsdp2 import loading, lora, sequence
from areal_fsdp2.experts import expert_layers, rows_within_experts, spread_experts
from areal_fsdp2.mesh import Mesh
from areal_fsdp2.options import Fsdp2Options
from areal_fsdp2.pipeline import Absent, keep_stage
from areal_fsdp2.plans import own_slice, slice_model
from areal_fsdp2.sequence import Stretch


class PackedModel(nn.Module, ABC):
    """The root that FSDP wraps. Invariant: a token's number depends on its row and the weights, on nothing else."""

    optional: tuple[str, ...] = ()
    """Tensors that a folder need not hold; they start at 0."""

    def __init__(self, module: PreTrainedModel, amp: AmpSpec, mesh: Mesh) -> None:
        super().__init__()
        self.module = module
        self._amp = amp
        self._mesh = mesh
        self.has_tied_copy = False
        """Whether this is the first or the last stage of a pipeline, which both hold a tied embedding."""

    @property
    def config(self) -> Any:
        """The configuration of the text model."""
        return self.module.config.get_text_config()

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, in a pipeline this stage's."""
        return [layer for layer in layers_of(self.module) if not isinstance(layer, Absent)]

    @property
    def embedding(self) -> Tensor:
        """The weights of the input embedding."""
        return cast(nn.Embedding, self.module.get_input_embeddings()).weight

    def uncounted(self) -> list[Tensor]:
        """Return the parameters whose gradient another stage of a pipeline counts."""
        return [self.embedding] if self.has_tied_copy and self._mesh.place["pp"] else []

    def forward(
        self, packed: Packed, temperature: float, received: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | Tensor:
        """Return a number for each trained token and the entropy there ([N] float32 each).

        The number is its logprob, or a critic's value of the state before it; with gradient if grad is enabled. A
        stage of a pipeline computes from what it `received` (states [1, T, H], None on the first); all but the last
        return states [1, T, H].
        """
        with torch.autocast(self._mesh.device.type, AMP_DTYPES[self._amp.dtype], enabled=self._amp.enabled):
            if self._mesh.dimensions.sp == 1:
                hidden = self._hidden(packed.token_ids, packed.positions, received, row_groups=packed.groups)
                if not self._has_head:
                    return hidden
                hidden = hidden[0, packed.predictors]
                return self._numbers(hidden, packed.predictor, packed.targets, temperature)
            return self._own_part(packed, Stretch.of(packed, self._mesh.group("sp")), temperature, received)

    @property
    def _has_head(self) -> bool:
        return self._mesh.place["pp"] == self._mesh.dimensions.pp - 1

    def _own_part(
        self, packed: Packed, stretch: Stretch, temperature: float, received: Tensor | None
    ) -> tuple[Tensor, Tensor] | Tensor:
        """Compute a stretch of the sequence and the numbers that it predicts; the ranks exchange these alone."""
        ids, positions = stretch.own(packed.token_ids), stretch.own(packed.positions)
        hidden = self._hidden(ids, positions, received, row_groups=packed.groups, stretch=stretch)
        if not self._has_head:
            return hidden
        places, is_own, predictor = stretch.predictors(packed)
        own = self._numbers(hidden[0, places], predictor[is_own], packed.targets[is_own], temperature)
        return stretch.gathered(own, is_own)

    def _hidden(self, token_ids: Tensor, positions: Tensor, received: Tensor | None, **attention: Any) -> Tensor:
        """Return the last hidden states [1, T, H]."""
        start = {"input_ids": token_ids.unsqueeze(0)} if received is None else {"inputs_embeds": received}
        output = self.module.base_model(**start, position_ids=positions.unsqueeze(0), use_cache=False, **attention)
        return output.last_hidden_state

    @abstractmethod
    def _numbers(self, hidden: Tensor, predictor: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return what `forward` does, for `targets` [N] of the predictors' states [P, H]; `predictor` [N]: which."""


class PolicyModel(PackedModel):
    """A causal language model. Invariant: logprobs are those of the model's own forward pass, row by row."""

    def _numbers(self, hidden: Tensor, predictor: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        head = cast(nn.Linear, self.module.get_output_embeddings())
        weight, bias = own_slice(head.weight), own_slice(head.bias)
        scale, softcap = logit_scaling(self.config)
        more: dict[str, Any] = {}
        if self._mesh.dimensions.tp > 1:
            more = {"vocab_start": self._mesh.place["tp"] * len(weight), "group": self._mesh.group("tp")}
        return head_logprobs(
            hidden, weight, predictor, targets, temperature, bias=bias, scale=scale, softcap=softcap, **more
        )


class CriticModel(PackedModel):
    """A backbone with one number for each state. Invariant: a head that the folder does not hold starts at 0."""

    optional = ("score.weight", "score.bias")

    def _numbers(self, hidden: Tensor, predictor: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        with torch.autocast(self._mesh.device.type, enabled=False):  # values are subtracted from each other
            values = cast(nn.Module, self.module.score)(hidden.float())[predictor, 0]
        return values, torch.zeros_like(values)


def layers_of(module: nn.Module) -> nn.ModuleList:
    """Return the decoder layers of a Hugging Face module: the list of modules that holds most of it."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    if not lists:
        raise WorkerFailed(f"{type(module).__name__} has no list of decoder layers; use another model")
    return max(lists, key=lambda found: sum(parameter.numel() for parameter in found.parameters()))


def make_model(context: BackendContext, options: Fsdp2Options, mesh: Mesh, folder: Any) -> PackedModel:
    """Return the model of a role, spread over the mesh, with memory that is not filled yet."""
    model = _on_meta(context, mesh, folder)
    if options.lora is not None:
        lora.inject(model.module, options.lora, model.optional)
    if mesh.dimensions.pp > 1:
        model.has_tied_copy = keep_stage(model.module, mesh.place["pp"], mesh.dimensions.pp)
    if mesh.dimensions.sp > 1:
        model.module.set_attn_implementation(sequence.NAME)
    if mesh.dimensions.tp > 1:
        slice_model(model.module, model.layers, mesh.tp)
    if mesh.dimensions.ep * mesh.dimensions.tp > 1 and expert_layers(model.module):
        spread_experts(model.module, mesh.experts)
    if context.training.activation_checkpointing:
        checkpoint_activations(model.module)
    shard(model, context.training, mesh, cpu_offload=options.cpu_offload)
    loading.materialise(model, torch.device("cpu") if options.cpu_offload else mesh.device)
    return model


def shard(model: PackedModel, training: TrainingSpec, mesh: Mesh, *, cpu_offload: bool) -> None:
    """Shard each decoder layer, a critic's head, and what is left; gradients are summed, never averaged."""
    amp = training.amp
    offload = CPUOffloadPolicy(pin_memory=mesh.device.type != "cpu") if cpu_offload else OffloadPolicy()
    low = MixedPrecisionPolicy(
        param_dtype=AMP_DTYPES[amp.dtype] if amp.enabled else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    full = MixedPrecisionPolicy(cast_forward_inputs=False)
    for part in (part for part in expert_layers(model) if hasattr(part, "spread")):
        fully_shard(
            part,
            mesh=mesh.beside_experts,
            mp_policy=low,
            offload_policy=offload,
            shard_placement_fn=lambda weight: rows_within_experts(weight, mesh.beside_experts.size(-1)),
        )
    for layer in model.layers:
        fully_shard(layer, mesh=mesh.fsdp, mp_policy=low, offload_policy=offload)
    if isinstance(model, CriticModel) and not isinstance(model.module.score, Absent):
        fully_shard(cast(nn.Module, model.module.score), mesh=mesh.fsdp, mp_policy=full, offload_policy=offload)
    fully_shard(model, mesh=mesh.fsdp, mp_policy=low, offload_policy=offload)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            # Losses are divided by the whole batch's totals: ranks' gradients are shares of one sum.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    if amp.enabled:
        # The residual stream stays float32, as under autocast on one device.
        model.module.get_input_embeddings().register_forward_hook(_as_float)


def _on_meta(context: BackendContext, mesh: Mesh, folder: Any) -> PackedModel:
    amp = context.training.amp
    if context.role == "critic":
        module = loading.skeleton(AutoModelForTokenClassification, folder, num_labels=1)
        if not isinstance(getattr(module, "score", None), nn.Linear):
            raise WorkerFailed(f"{type(module).__name__} has no linear head 'score' for a critic; use another model")
        return CriticModel(module, amp, mesh)
    module = loading.skeleton(AutoModelForCausalLM, folder)
    if module.get_output_embeddings() is None:
        raise WorkerFailed(f"{type(module).__name__} has no LM head; use a causal language model")
    return PolicyModel(module, amp, mesh)


def _as_float(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.float()
