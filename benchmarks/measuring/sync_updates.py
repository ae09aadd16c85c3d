"""What a real update changes: the share of bfloat16 words, and the bytes of the delta."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from areal.builtins.resharders.delta import encode

SPREAD = 0.02
SETTLING_STEPS = 25
"""AdamW's moments are corrected for their beginning in the first steps, which makes those larger; they do not count."""
COLUMNS = 64


def sampled_weights(model: str | None, num_parameters: int) -> torch.Tensor:
    """Return [*, COLUMNS] float32 masters: rows from all matrices of a Hugging Face folder, or normal ones."""
    generator = torch.Generator().manual_seed(0)
    if model is None:
        return torch.randn(num_parameters // COLUMNS, COLUMNS, generator=generator) * SPREAD
    parts: list[torch.Tensor] = []
    for path in sorted(Path(model).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            parts += [file.get_tensor(name).float() for name in file.keys()]  # noqa: SIM118 - not a mapping
    parts = [part for part in parts if part.dim() == 2]
    step = max(1, sum(part.numel() for part in parts) // num_parameters)
    weights = torch.cat([part[::step].reshape(-1)[: part[::step].numel() // COLUMNS * COLUMNS] for part in parts])
    # A master lies anywhere in the cell of its bfloat16, not in the middle as when it was just loaded.
    cell = torch.where(weights == 0, 1.0, weights.abs()).log2().floor().exp2() / 128
    weights += cell * (torch.rand(weights.shape, generator=generator) - 0.5)
    return weights.view(-1, COLUMNS)


def update_share(weights: torch.Tensor, num_steps: int, learning_rate: float) -> dict[str, float]:
    """Return the mean over `num_steps` steps of AdamW, weights [*, COLUMNS] cast to bfloat16 before and after each.

    A gradient is what an RL step gives: noise with heavy tails (Student's t with 4 degrees of freedom) whose size
    differs from row to row (log-normal, deviation 1), and a tenth of it a direction that stays from step to step;
    clipped to norm 1.
    """
    generator = torch.Generator().manual_seed(1)
    shape = weights.shape

    def heavy() -> torch.Tensor:
        squares = -torch.rand(2, *shape, generator=generator).clamp_(min=1e-30).log_().sum(dim=0) / 2
        return torch.randn(shape, generator=generator) / squares.sqrt()

    master = torch.nn.Parameter(weights.clone())
    optimizer = torch.optim.AdamW([master], lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    scale, direction = torch.randn(shape[0], 1, generator=generator).exp(), heavy()
    shares: list[float] = []
    sizes: list[float] = []
    for step in range(SETTLING_STEPS + num_steps):
        before = master.detach().bfloat16().view(torch.uint8).view(-1).numpy().copy()
        master.grad = scale * (0.1 * direction + heavy())
        torch.nn.utils.clip_grad_norm_([master], 1.0)
        optimizer.step()
        after = master.detach().bfloat16().view(torch.uint8).view(-1).numpy()
        if step >= SETTLING_STEPS:
            delta = encode(before, after)
            shares.append(float((before.view("u2") != after.view("u2")).mean()))
            sizes.append((len(after) if delta is None else len(delta)) / len(after))
    return {"changed_share": sum(shares) / len(shares), "model_over_delta_bytes": len(sizes) / sum(sizes)}
