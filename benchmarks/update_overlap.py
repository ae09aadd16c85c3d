"""How long a trainer waits for the update of its weights: within the step, and beside the next mini-batch.

    python benchmarks/update_overlap.py [--rounds 5] [--tokens 256] [--threads 1] [--out FILE]

One rank of the backend fsdp2 on the CPU, a model of SmolLM2's size (135M parameters, random weights), two mini-batches
a round, with ``overlap_update`` off and on in turns in one process. In the table are medians of all steps, in seconds:

    to return    from the end of the backward pass until train_step returns
    to embed     from there until the next mini-batch's first weights are gathered
    to layer 1   and until its first layer computes
    step         of a whole step, from one end of the backward pass to the next
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from areal.algorithms.grpo import Grpo
from areal.contracts.messages import Batch, Row
from areal.contracts.specs import BackendContext, ModelSpec, TrainingSpec
from areal.testing.engine_fixtures import HostCpu
from areal_fsdp2.backend import Fsdp2Backend
from areal_fsdp2.options import Fsdp2Options

VOCAB = 49152
ROW_TOKENS = 64
COLUMNS = ("to return", "to embed", "to layer 1", "step")


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        model_of_135m(folder)
        sides = {name: Watched(folder, args, overlaps=name == "beside") for name in ("within", "beside")}
    batches = [batch_of(seed, args.tokens) for seed in range(2)]
    load_before = os.getloadavg()[0]
    for number in range(args.rounds + 1):
        for side in sides.values():
            side.round(batches, counts=number > 0)  # the first one makes the moments
    print(f"load average before and after: {load_before:.1f}, {os.getloadavg()[0]:.1f}")
    print(f"{'update':>8}" + "".join(f"{column:>12}" for column in COLUMNS))
    report: dict[str, Any] = {"arguments": {key: str(value) for key, value in vars(args).items()}}
    for name, side in sides.items():
        report[name] = {column: statistics.median(side.seconds[column]) for column in COLUMNS}
        print(f"{name:>8}" + "".join(f"{report[name][column]:>12.3f}" for column in COLUMNS))
        side.backend.close()
    if args.out:
        args.out.write_text(json.dumps(report, indent=2) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of two mini-batches on each side")
    parser.add_argument("--tokens", type=int, default=256, help="of a mini-batch")
    parser.add_argument("--threads", type=int, default=1, help="of torch, for the passes and again for the update")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    return parser.parse_args()


def model_of_135m(folder: str) -> None:
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=VOCAB,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


def batch_of(seed: int, num_tokens: int) -> Batch:
    rng = random.Random(seed)
    rows: list[Row] = []
    for _ in range(max(1, num_tokens // ROW_TOKENS)):
        ids = tuple(rng.randrange(VOCAB) for _ in range(ROW_TOKENS))
        rows.append(
            Row(
                token_ids=ids,
                loss_mask=(False, *(True,) * (ROW_TOKENS - 1)),
                logprobs=(-10.0,) * ROW_TOKENS,
                versions=(0,) * ROW_TOKENS,
                advantages=(rng.uniform(-1, 1),) * ROW_TOKENS,
            )
        )
    return Batch(rows=tuple(rows), num_tokens=sum(row.num_loss_tokens for row in rows), num_sequences=len(rows))


class Watched:
    """A backend whose steps are timed. Invariant: every time counts from the end of a backward pass."""

    def __init__(self, folder: str, args: argparse.Namespace, *, overlaps: bool) -> None:
        training = TrainingSpec(learning_rate=1e-5, micro_batch_tokens=args.tokens)
        context = BackendContext(model=ModelSpec(path=folder), training=training, accelerator=HostCpu(), seed=0)
        self.backend = Fsdp2Backend(Fsdp2Options(overlap_update=overlaps), context)
        self.backend.start()
        self.seconds: dict[str, list[float]] = {column: [] for column in COLUMNS}
        self._since = 0.0
        self._seen: dict[str, float] = {}
        model, optimizer = self.backend._model, self.backend._optimizer
        assert model is not None
        # Behind FSDP's own hooks.
        model.module.base_model.register_forward_pre_hook(self._noting("to embed"))
        model.layers[0].register_forward_pre_hook(self._noting("to layer 1"))
        step = optimizer.step

        def timed(learning_rate: float) -> tuple[float, bool]:
            self._note("step")
            self._flush()
            self._since = time.monotonic()
            return step(learning_rate)

        optimizer.step = timed

    def round(self, batches: list[Batch], *, counts: bool) -> None:
        """Make the updates; what comes before the first is not timed."""
        self._since = 0.0
        for batch in batches:
            self.backend.train_step(batch, Grpo())
            self._note("to return")
        self.backend._optimizer.settle()
        if not counts:
            for times in self.seconds.values():
                times.clear()

    def _noting(self, name: str) -> Callable[..., None]:
        return lambda *_: self._note(name)

    def _note(self, name: str) -> None:
        if self._since:
            self._seen.setdefault(name, time.monotonic() - self._since)

    def _flush(self) -> None:
        for name, value in self._seen.items():
            self.seconds[name].append(value)
        self._seen = {}


if __name__ == "__main__":
    main()
