"""What training changes: the trained parameters by their Hugging Face names, and Adam's moments of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from areal_fsdp2.shards import Part, local, parts_of_parameter, regions_of

MOMENTS = ("exp_avg", "exp_avg_sq")


class Trained:
    """Invariant: a parameter has both moments or none, and as many steps on every rank."""

    def __init__(self, module: nn.Module, adams: Sequence[torch.optim.Optimizer]) -> None:
        """`adams`: each trained parameter is in one of them."""
        self._adams = {
            parameter: adam for adam in adams for group in adam.param_groups for parameter in group["params"]
        }
        self._named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        self.parts = [part for name, parameter in self._named for part in parts_of_parameter(name, parameter)]

    def moments(self) -> dict[str, list[Part]]:
        """Return this rank's parts of the moments that there are; their views are Adam's own memory."""
        found: dict[str, list[Part]] = {kind: [] for kind in MOMENTS}
        for name, parameter in self._named:
            for kind in MOMENTS:
                if (moment := self._state(parameter).get(kind)) is not None:
                    found[kind] += parts_of_parameter(name, moment)
        return found

    def steps(self) -> dict[str, float]:
        """Return how many updates each parameter has had, by the name of its first tensor; those without: left out."""
        return {
            _key(name, parameter): float(state["step"])
            for name, parameter in self._named
            if "step" in (state := self._state(parameter))
        }

    @torch.no_grad()
    def restart(self, steps: Mapping[str, float]) -> None:
        """Set the numbers of updates; moments of parameters with some are made anew, as 0, the others are forgotten."""
        for name, parameter in self._named:
            adam = self._adams[parameter]
            if (step := steps.get(_key(name, parameter))) is None:
                adam.state.pop(parameter, None)
                continue
            is_fused = bool(adam.defaults.get("fused"))
            state: dict[str, Tensor] = {kind: torch.zeros_like(parameter) for kind in MOMENTS}
            device = local(parameter).device if is_fused else torch.device("cpu")
            state["step"] = torch.tensor(step, dtype=torch.float32, device=device)
            adam.state[parameter] = state

    def _state(self, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        return self._adams[parameter].state.get(parameter, {})


def _key(name: str, parameter: nn.Parameter) -> str:
    return regions_of(name, tuple(parameter.shape))[0].name
