"""Where TRL has the same loss, it has the same value and the same gradient on the same tensors.

TRL runs in an environment of its own, made on the first run; `trl_losses.py` calls its trainers there, from rewards to
gradient. Rows are ragged, padded on TRL's side, and have tokens between the sampled ones that are not trained.

Not compared, because the formulas are others, whatever the names say:

- ``scale: batch`` and ``batch_std``: TRL's ``scale_rewards: batch`` divides by the deviation of the batch's rewards,
  we by that of the advantages of the batch's tokens (REINFORCE++, Lite PPO);
- divergence in the reward: TRL's RLOO takes a sequence's off its reward before rewards are compared, we take each
  token's and all later ones' off the advantage afterwards; of estimators TRL's losses know k3 only;
- ``use_bias_correction_kl``, on by default in TRL, multiplies the divergence by the ratio; it is off here;
- RLOO away from ratio 1: TRL clips a sequence's product of ratios, we clip each token's.

Nor what one side lacks: ``behavior_level: geometric``, ``proximal: loglinear``, ``turn_discount`` and PPO's critic are
not in TRL, ``luspo``, ``vespo`` and the masks for stale sequences and high entropy not here.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from measuring.trl_environment import MAKING_S, trl_python
from torch import Tensor
from trl_pairs import PAIRS, Pair

from areal.algorithms.advantages import EPS, overlong_penalty
from areal.algorithms.dpo import Dpo, DpoOptions
from areal.algorithms.rloo import Rloo, RlooOptions
from areal.algorithms.sft import Sft
from areal.contracts.algorithm import TokenBatch
from areal.contracts.messages import Group
from areal.testing.samples import group_of, sampled

ANSWERING_S = 300.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(MAKING_S + ANSWERING_S + 60)]

GROUP_SIZE = 4
REWARDS: tuple[float | None, ...] = (
    *(1.0, 0.0, 0.5, 0.25),
    *(0.75, None, 0.0, 1.0),
    *(0.5, 0.5, 0.5, 0.5),
    *(-2.0, 3.0, -0.125, 0.0),
    *(None, 1.0, None, None),
    *(0.0, 0.0, 1.0, 0.0),
)
"""By group; TRL keeps rewards as float32, which has all of these."""
SEEDS = (1, 2)
TRL_EPS = 1e-4
"""What TRL adds to a standard deviation, where we add EPS."""
PREFERENCES = {
    "sigmoid": (DpoOptions(beta=0.3), {"loss_type": ["sigmoid"], "beta": 0.3}),
    # TRL smooths by this formula in `aot` only, which sorts the batch's pairs first; one pair has no order.
    "smoothed": (
        DpoOptions(beta=0.3, label_smoothing=0.1),
        {"loss_type": ["aot"], "beta": 0.3, "label_smoothing": 0.1},
    ),
    # TRL's squared loss is of means over tokens, ours of sums: answers of one token.
    "ipo": (DpoOptions(beta=0.3, preference="ipo"), {"loss_type": ["ipo"], "beta": 0.3}),
}
OVERLONG = {"limit": 10, "buffer": 4, "lengths": [1, 5, 6, 7, 9, 10, 11, 30]}

Row = dict[str, Any]
"""One sampled answer: its reward, and for each token whether it is trained, and the logprobs of every policy."""


def make_rows(seed: int, rewards: Sequence[float | None], *, longest: int = 6, holes: bool = True) -> list[Row]:
    """Return random answers; the first token is trained, later ones mostly if there are `holes`, else all."""
    source = random.Random(seed)

    def near(values: Sequence[float], spread: float) -> list[float]:
        return [value + source.uniform(-spread, spread) for value in values]

    rows: list[Row] = []
    for reward in rewards:
        length = source.randint(1, longest)
        current = [source.uniform(-3.0, -0.1) for _ in range(length)]
        proximal = near(current, 0.4)
        rows.append(
            {
                "reward": reward,
                "trained": [int(i == 0 or not holes or source.random() < 0.75) for i in range(length)],
                "current": current,
                "proximal": proximal,
                "behavior": near(proximal, 0.4),
                "reference": near(current, 0.6),
                "entropy": [source.uniform(0.1, 3.0) for _ in range(length)],
            }
        )
    return rows


def groups_of(rows: Sequence[Row]) -> list[Group]:
    """Return the rows as groups of trajectories of one turn."""
    groups: list[Group] = []
    for number, start in enumerate(range(0, len(rows), GROUP_SIZE)):
        members = enumerate(rows[start : start + GROUP_SIZE])
        made = [sampled(row["reward"], len(row["trained"]), group=number, sample=sample) for sample, row in members]
        groups.append(group_of(made, number))
    return groups


def advantages_of(algorithm: Any, rows: Sequence[Row]) -> list[float]:
    return [advantage for group in groups_of(rows) for advantage in algorithm.advantages(group)]


class Ours:
    """Our loss of rows, and its gradients. Invariant: float64, trained tokens only, one micro-batch."""

    def __init__(
        self, algorithm: Any, rows: Sequence[Row], advantages: Sequence[float], *, old: str, sampler: str, groups: int
    ) -> None:
        self._rows = rows
        current, entropy = (self._flat(name).requires_grad_() for name in ("current", "entropy"))
        num_trained = [sum(row["trained"]) for row in rows]
        sequence = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(num_trained))
        batch = TokenBatch(
            behavior_logprobs=self._flat(sampler),
            proximal_logprobs=self._flat(old),
            reference_logprobs=self._flat("reference"),
            advantages=torch.tensor(advantages, dtype=torch.float64)[sequence],
            versions=torch.zeros_like(sequence),
            version=0,
            first_update=True,
            sequence=sequence,
            num_sequences=len(rows),
            group=torch.arange(len(rows)) // (len(rows) // groups),
            entropy=entropy,
            total_tokens=len(sequence),
            total_sequences=len(rows),
            computed_tokens=len(sequence),
            computed_groups=groups,
        )
        loss, self.statistics = algorithm.loss(current, batch)
        self.loss = float(loss.detach())
        slopes = torch.autograd.grad(loss, [current, entropy], allow_unused=True)
        self.gradients = dict(zip(("current", "entropy"), map(self._by_row, slopes), strict=True))

    def _flat(self, name: str) -> Tensor:
        return torch.tensor(
            [value for row in self._rows for value, trained in zip(row[name], row["trained"], strict=True) if trained],
            dtype=torch.float64,
        )

    def _by_row(self, slopes: Tensor | None) -> list[list[float]]:
        """Return a number for each token of each row, 0 for those that are not trained or not looked at."""
        numbers = iter([] if slopes is None else slopes.tolist())
        return [[next(numbers, 0.0) if trained else 0.0 for trained in row["trained"]] for row in self._rows]

    def agrees(self, answer: dict[str, Any], *, loss: bool = True) -> None:
        if loss:
            assert self.loss == pytest.approx(answer["loss"], rel=1e-9, abs=1e-12)
        for name, gradient in self.gradients.items():
            for ours, theirs in zip(gradient, answer[name], strict=True):
                assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12), name


def policy_rows(seed: int) -> list[Row]:
    return make_rows(seed, REWARDS)


def on_policy_rows() -> list[Row]:
    return [row | {"proximal": row["current"]} for row in make_rows(3, REWARDS, holes=False)]


def preference_rows(name: str) -> list[Row]:
    """Return for each pair its two answers, in the order of sampling."""
    rewards = REWARDS[:GROUP_SIZE] if name == "smoothed" else REWARDS
    rows = make_rows(4, rewards, longest=1 if name == "ipo" else 6, holes=False)
    signs = advantages_of(Dpo(), rows)
    return [row | {"sign": sign} for row, sign in zip(rows, signs, strict=True) if sign]


def answer_rows() -> list[Row]:
    return make_rows(5, REWARDS)


def jobs() -> dict[str, dict[str, Any]]:
    """Return everything that TRL is asked, in one go: starting it takes longer than all the rest."""
    asked: dict[str, dict[str, Any]] = {}
    in_groups = {"group_size": GROUP_SIZE, "sampler_differs": False, "parts": 1}
    for name, pair in PAIRS.items():
        settings = {"settings": dict(pair.theirs), "sampler_differs": pair.corrected, "parts": pair.parts}
        for seed in SEEDS:
            asked[f"{name}/{seed}"] = in_groups | settings | {"trainer": "grpo", "rows": policy_rows(seed)}
    asked["rloo"] = in_groups | {"trainer": "rloo", "rows": on_policy_rows(), "settings": {"beta": 0.0}}
    for name, (_, settings) in PREFERENCES.items():
        rows = preference_rows(name)
        pairs = [sorted((i, i + 1), key=lambda row: -rows[row]["sign"]) for i in range(0, len(rows), 2)]
        asked[f"dpo/{name}"] = {"trainer": "dpo", "rows": rows, "pairs": pairs, "settings": settings}
    asked["sft"] = {"trainer": "sft", "rows": answer_rows(), "settings": {}}
    asked["overlong"] = {"trainer": "overlong", **OVERLONG}
    return asked


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What TRL says to all `jobs`."""
    folder = tmp_path_factory.mktemp("trl")
    (folder / "jobs.json").write_text(json.dumps(jobs()), encoding="utf-8")
    ended = subprocess.run(
        [trl_python(), "-I", str(Path(__file__).with_name("trl_losses.py")), "jobs.json", "answers.json"],
        cwd=folder,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=ANSWERING_S,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads((folder / "answers.json").read_text(encoding="utf-8"))


def ours_of(pair: Pair, seed: int, advantages: Sequence[float]) -> Ours:
    """Return our side with the policies that TRL has: without a correction, its old one takes the place of two."""
    naive = pair.ours.policy_options.objective == "naive"
    sampler = "behavior" if pair.corrected else "proximal"
    # The naive objective does not look at the proximal policy; were it looked at, the difference would show.
    old = "reference" if naive else "proximal"
    return Ours(pair.ours, policy_rows(seed), advantages, old=old, sampler=sampler, groups=len(REWARDS) // GROUP_SIZE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", PAIRS)
def test_a_policy_loss_is_trls(answers: dict[str, Any], name: str, seed: int) -> None:
    answer = answers[f"{name}/{seed}"]
    ours_of(PAIRS[name], seed, answer["advantages"]).agrees(answer)


@pytest.mark.parametrize("name", [name for name in PAIRS if "sapo" not in name])
def test_tokens_are_clipped_on_both_sides_of_the_comparison(answers: dict[str, Any], name: str) -> None:
    """A loss whose bounds are never met would agree with any other bounds."""
    for seed in SEEDS:
        share = float(ours_of(PAIRS[name], seed, answers[f"{name}/{seed}"]["advantages"]).statistics["clip_fraction"])
        assert 0.02 < share < 0.9


def test_every_setting_makes_a_difference(answers: dict[str, Any]) -> None:
    """No two of TRL's losses are the same, so that agreement with one is disagreement with all others."""
    for seed in SEEDS:
        assert len({round(answers[f"{name}/{seed}"]["loss"], 7) for name in PAIRS}) == len(PAIRS)


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo"])
def test_advantages_are_trls(answers: dict[str, Any], name: str) -> None:
    rows = policy_rows(1)
    ours = advantages_of(PAIRS[name].ours, rows)
    if name != "dr_grpo":
        for start in range(0, len(rows), GROUP_SIZE):
            known = [row["reward"] for row in rows[start : start + GROUP_SIZE] if row["reward"] is not None]
            deviation = statistics.stdev(known) if len(known) > 1 else 0.0
            for i in range(start, start + GROUP_SIZE):
                ours[i] *= (deviation + EPS) / (deviation + TRL_EPS)
    assert ours == pytest.approx(answers[f"{name}/1"]["advantages"], rel=1e-9, abs=1e-12)
    assert len({round(advantage, 6) for advantage in ours}) > 8


def test_rloo_has_trls_advantages_and_its_gradient_on_policy(answers: dict[str, Any]) -> None:
    """With all ratios 1 a product's gradient is the sum of its tokens': ours, each sequence's sum over 1."""
    rows, answer = on_policy_rows(), answers["rloo"]
    algorithm = Rloo(RlooOptions(aggregation="fixed_length", fixed_length=1))
    advantages = advantages_of(algorithm, rows)
    assert advantages == pytest.approx(answer["advantages"], rel=1e-9, abs=1e-12)
    Ours(algorithm, rows, advantages, old="current", sampler="current", groups=6).agrees(answer, loss=False)


@pytest.mark.parametrize("name", PREFERENCES)
def test_a_preference_loss_is_trls(answers: dict[str, Any], name: str) -> None:
    rows = preference_rows(name)
    assert len(rows) == (2 if name == "smoothed" else 8)
    signs = [row["sign"] for row in rows]
    algorithm = Dpo(PREFERENCES[name][0])
    Ours(algorithm, rows, signs, old="proximal", sampler="behavior", groups=len(rows) // 2).agrees(
        answers[f"dpo/{name}"]
    )


def test_the_loss_of_reference_answers_is_trls(answers: dict[str, Any]) -> None:
    rows = answer_rows()
    Ours(Sft(), rows, [1.0] * len(rows), old="proximal", sampler="behavior", groups=6).agrees(answers["sft"])


def test_the_penalty_for_long_answers_is_trls(answers: dict[str, Any]) -> None:
    limit, buffer = OVERLONG["limit"], OVERLONG["buffer"]
    ours = [overlong_penalty(n, limit=limit, buffer=buffer) for n in OVERLONG["lengths"]]
    assert ours == pytest.approx(answers["overlong"]["penalties"])
