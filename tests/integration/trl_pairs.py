"""The policy losses that both sides have, each as either side spells it; test_trl_parity.py compares them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal.algorithms.cispo import Cispo, CispoOptions
from areal.algorithms.dapo import Dapo, DapoOptions
from areal.algorithms.dr_grpo import DrGrpo, DrGrpoOptions
from areal.algorithms.grpo import Grpo, GrpoOptions
from areal.algorithms.gspo import Gspo, GspoOptions
from areal.algorithms.policy import PolicyGradient
from areal.algorithms.sapo import Sapo, SapoOptions


@dataclass(frozen=True)
class Pair:
    """One loss twice. Invariant: TRL's loss of `parts` micro-batches adds up to ours of the whole batch."""

    ours: PolicyGradient
    theirs: Mapping[str, Any]
    """Settings of `GRPOConfig`."""
    corrected: bool = False
    """The sampler's policy is another than the proximal one. TRL has that with vLLM only; without, its one old policy
    is both."""
    parts: int = 2


CAP: dict[str, Any] = {"behavior_cap": 1.4, "behavior_floor": 0.75}
TRL_CAP = {"vllm_importance_sampling_clip_max": 1.4, "vllm_importance_sampling_clip_min": 0.75}
KL: dict[str, Any] = {"kl_coefficient": 0.3}
TRL_KL = {"beta": 0.3, "use_bias_correction_kl": False}
NARROW: dict[str, Any] = {"clip_low": 0.05, "clip_high": 0.04}
TRL_NARROW = {"epsilon": 0.05, "epsilon_high": 0.04}
PER_SEQUENCE: dict[str, Any] = {"aggregation": "sequence_mean"}

TRL_GRPO = {"loss_type": "grpo"}
TRL_DAPO = {"loss_type": "dapo"}
TRL_DR_GRPO = {"loss_type": "dr_grpo", "scale_rewards": "none", "max_completion_length": 7}
TRL_GSPO = {"loss_type": "grpo", "importance_sampling_level": "sequence", **TRL_NARROW}
# TRL names the largest weight, we what it is above 1; the smallest is 0 on both sides.
TRL_CISPO = {"loss_type": "cispo", "epsilon_high": 1.3}
TRL_SAPO = {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}


def _mode(mode: str) -> dict[str, Any]:
    return {"vllm_importance_sampling_mode": mode, **TRL_CAP}


PLAIN = {
    "grpo": Pair(Grpo(GrpoOptions(**PER_SEQUENCE)), TRL_GRPO),
    # A mean over tokens is one of each micro-batch's mean in `bnpo`, one of all tokens in `dapo` and here.
    "token mean": Pair(Grpo(), {"loss_type": "bnpo"}, parts=1),
    "two bounds": Pair(
        Grpo(GrpoOptions(clip_low=0.1, clip_high=0.15)), TRL_DAPO | {"epsilon": 0.1, "epsilon_high": 0.15}
    ),
    "dapo": Pair(Dapo(), TRL_DAPO | {"epsilon_high": 0.28}),
    "dapo per sequence": Pair(Dapo(DapoOptions(**PER_SEQUENCE)), TRL_GRPO | {"epsilon_high": 0.28}),
    # One old policy, asked for by its other name.
    "naive": Pair(Grpo(GrpoOptions(objective="naive", clip_low=0.3)), TRL_DAPO | {"epsilon": 0.3, "epsilon_high": 0.2}),
    # With the bound above 1 + clip_high the two are one formula; a bound below that gives way to the clip in TRL only.
    "dual clip": Pair(Grpo(GrpoOptions(dual_clip=1.3)), TRL_DAPO | {"delta": 1.3}),
    "dr_grpo": Pair(DrGrpo(DrGrpoOptions(fixed_length=7)), TRL_DR_GRPO),
    "gspo": Pair(Gspo(GspoOptions(**NARROW)), TRL_GSPO),
    "cispo": Pair(Cispo(CispoOptions(clip_high=0.3)), TRL_CISPO),
    "sapo": Pair(Sapo(), TRL_SAPO),
    "sapo, other gates": Pair(
        Sapo(SapoOptions(temperature_positive=2.0, temperature_negative=0.5)),
        TRL_SAPO | {"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5},
    ),
    # The bonus is a mean over each micro-batch's tokens in TRL, over the batch's here.
    "entropy bonus": Pair(Grpo(GrpoOptions(entropy_coefficient=0.2)), TRL_DAPO | {"entropy_coef": 0.2}, parts=1),
}
CORRECTED = {
    "clamped tokens": Pair(
        Grpo(GrpoOptions(behavior_mode="clamp", **CAP)), TRL_DAPO | _mode("token_truncate"), corrected=True
    ),
    "masked tokens": Pair(Grpo(GrpoOptions(**CAP)), TRL_DAPO | _mode("token_mask"), corrected=True),
    "clamped sequences": Pair(
        Grpo(GrpoOptions(behavior_level="sequence", behavior_mode="clamp", **CAP)),
        TRL_DAPO | _mode("sequence_truncate"),
        corrected=True,
    ),
    "masked sequences": Pair(
        Grpo(GrpoOptions(behavior_level="sequence", **CAP)), TRL_DAPO | _mode("sequence_mask"), corrected=True
    ),
    "corrected gspo": Pair(
        Gspo(GspoOptions(behavior_level="sequence", **NARROW, **CAP)),
        TRL_GSPO | _mode("sequence_mask"),
        corrected=True,
    ),
    "corrected cispo": Pair(
        Cispo(CispoOptions(clip_high=0.3, **CAP)), TRL_CISPO | _mode("token_truncate"), corrected=True
    ),
    "corrected sapo": Pair(
        Sapo(SapoOptions(objective="decoupled", **CAP)), TRL_SAPO | _mode("token_mask"), corrected=True
    ),
}
WITH_KL = {
    "kl": Pair(Grpo(GrpoOptions(**KL)), TRL_DAPO | TRL_KL),
    "grpo with kl": Pair(Grpo(GrpoOptions(**PER_SEQUENCE, **KL)), TRL_GRPO | TRL_KL),
    "dr_grpo with kl": Pair(DrGrpo(DrGrpoOptions(fixed_length=7, **KL)), TRL_DR_GRPO | TRL_KL),
    "gspo with kl": Pair(Gspo(GspoOptions(**NARROW, **KL)), TRL_GSPO | TRL_KL),
    "sapo with kl": Pair(Sapo(SapoOptions(**KL)), TRL_SAPO | TRL_KL),
    # The correction weighs the surrogate and leaves the divergence alone.
    "corrected, with kl": Pair(Grpo(GrpoOptions(**KL, **CAP)), TRL_DAPO | TRL_KL | _mode("token_mask"), corrected=True),
    "everything": Pair(
        Dapo(DapoOptions(dual_clip=1.35, entropy_coefficient=0.1, behavior_mode="clamp", **KL, **CAP)),
        TRL_DAPO | TRL_KL | _mode("token_truncate") | {"epsilon_high": 0.28, "delta": 1.35, "entropy_coef": 0.1},
        corrected=True,
        parts=1,
    ),
}
PAIRS: dict[str, Pair] = PLAIN | CORRECTED | WITH_KL
