"""One rank's share of an LM head's forward and backward pass, in three ways: its peak of memory and its time.

    python benchmarks/measuring/head_sides.py JSON OUT

JSON holds `Case` fields, `rounds`, and `what`: memory (VmHWM of this process) or time (the sides take turns).
"""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as collectives
from torch.testing._internal.distributed.fake_pg import FakeStore

from areal.algorithms.update.logprobs import head_logprobs
from measuring.live_bytes import LiveBytes
from measuring.processes import status

LOGITS, LOGPROBS, OURS = "gather logits", "gather logprobs", "ours"
SIDES = (LOGITS, LOGPROBS, OURS)
MIB = 2**20


@dataclass(frozen=True)
class Case:
    side: str
    sequence: int
    """Tokens of all ranks together."""
    ranks: int
    dtype: str
    """Of hidden states and weight; softmax is float32 on every side."""
    hidden: int
    vocab: int


class Work:
    """The tensors of one rank: its states, the weight, and as long as training goes on AdamW's two moments of it."""

    def __init__(self, case: Case, *, fake: bool) -> None:
        self.case = case
        dtype, states = getattr(torch, case.dtype), case.sequence // case.ranks
        make = torch.empty if fake else torch.randn
        self.states = make(states, case.hidden, dtype=dtype).requires_grad_()
        self.weight = make(case.vocab, case.hidden, dtype=dtype).mul_(case.hidden**-0.5).requires_grad_()
        self.moments = [torch.zeros_like(self.weight).add_(0.0) for _ in range(2)]  # zeros alone are not touched
        targets = torch.zeros(case.sequence, dtype=torch.int64)
        self.targets = targets if fake else targets.random_(case.vocab)
        self.predictor = torch.arange(states)
        self.advantages = make(case.sequence)

    def tensors(self) -> list[Tensor]:
        return [self.states, self.weight, *self.moments, self.targets, self.predictor, self.advantages]

    def forward(self, side: str) -> Tensor:
        """Return a loss that needs every token's logprob and entropy, as PPO with an entropy bonus does."""
        own = self.targets[: len(self.states)]
        if side == LOGITS:
            numbers = literal(self._gathered(torch.nn.functional.linear(self.states, self.weight)), self.targets)
        else:
            if side == LOGPROBS:
                numbers = literal(torch.nn.functional.linear(self.states, self.weight), own)
            else:
                numbers = head_logprobs(self.states, self.weight, self.predictor, own)
            numbers = self._gathered(numbers[0]), self._gathered(numbers[1])
        return -(numbers[0] * self.advantages).mean() - 1e-3 * numbers[1].mean()

    def _gathered(self, tensor: Tensor) -> Tensor:
        if self.case.ranks == 1:
            return tensor
        return collectives.all_gather_single_autograd(tensor, 0, dist.group.WORLD)

    def forget(self) -> None:
        self.states.grad = self.weight.grad = None


def literal(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return logprobs and entropies as they are written in a textbook."""
    table = logits.float().log_softmax(-1)
    return table.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(table.exp() * table).sum(-1)


def counted(case: Case, *, fake: bool) -> dict[str, float]:
    """Return MiB alive before, and the peaks of both passes, by `LiveBytes`."""
    mode = FakeTensorMode() if fake else torch.no_grad()
    live = LiveBytes()
    with mode, torch.enable_grad():
        work = Work(case, fake=fake)
        live.count(*work.tensors())
        before = live.now
        with live:
            live.restart()
            loss = work.forward(case.side)
            forward = live.restart()
            loss.backward()
            backward = live.restart()
        floor = before + work.weight.nbytes + work.states.nbytes
    peaks = {"forward": forward, "backward": backward, "peak": max(forward, backward), "floor": floor}
    return {name: value / MIB for name, value in peaks.items()}


def join_fake_group(ranks: int) -> None:
    """Be rank 0 of `ranks` whose collectives allocate what real ones do, and move nothing."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())


def resident(case: Case) -> dict[str, float]:
    """Return MiB by which this process's resident memory grows above what it is before the work's tensors exist."""
    torch.randn(64, 64) @ torch.randn(64, 64)
    gc.collect()
    before = status("VmRSS")
    work = Work(case, fake=False)
    peaks: list[float] = []
    Path("/proc/self/clear_refs").write_text("5")
    loss = work.forward(case.side)
    peaks.append(status("VmHWM") - before)
    Path("/proc/self/clear_refs").write_text("5")
    loss.backward()
    peaks.append(status("VmHWM") - before)
    return {"forward": peaks[0], "backward": peaks[1], "peak": max(peaks)}


def timed(case: Case, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Return seconds on the clock and of the processor for both passes, round by round; the first does not count."""
    work = Work(case, fake=False)
    found: dict[str, list[dict[str, float]]] = {LOGPROBS: [], OURS: []}
    for _ in range(rounds + 1):
        for side, measured in found.items():
            began, cpu_began = time.perf_counter(), time.process_time()
            work.forward(side).backward()
            measured.append({"s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu_began})
            work.forget()
    return {side: measured[1:] for side, measured in found.items()}


def main() -> None:
    asked = json.loads(sys.argv[1])
    what, rounds, threads = asked.pop("what"), asked.pop("rounds"), asked.pop("threads")
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    case = Case(**asked)
    found: dict[str, Any] = timed(case, rounds) if what == "time" else resident(case)
    Path(sys.argv[2]).write_text(json.dumps({**asdict(case), "found": found}), encoding="utf-8")


if __name__ == "__main__":
    main()
