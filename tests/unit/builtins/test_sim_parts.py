"""The simulated environment, backend and resharder."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from sim_workers import SIM_LAYOUT, transfer

from areal.builtins.sim.backend import SimBackend, SimBackendOptions
from areal.builtins.sim.clock import collecting
from areal.builtins.sim.environment import SimEnvironment, SimEnvironmentOptions
from areal.builtins.sim.resharder import SimResharder, SimReshardOptions, receive_s
from areal.contracts.backend import Backend
from areal.contracts.environment import Reply
from areal.contracts.messages import Batch, Completion, Row
from areal.contracts.resharder import Resharder
from areal.contracts.specs import BackendContext, EnvironmentContext, ModelSpec, TrainingSpec
from areal.contracts.transfer import Layout
from areal.errors import JournalError, TransferFailed
from areal.testing.engine_fixtures import HostCpu


class Asked:
    """A client that notes how long the answers are to be."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    async def chat(self, messages: object, *, max_new_tokens: int | None = None) -> Reply:
        assert max_new_tokens is not None
        self.lengths.append(max_new_tokens)
        said = Completion(
            uid="",
            prompt_ids=(1,),
            token_ids=(5,) * max_new_tokens,
            logprobs=(-1.0,) * max_new_tokens,
            versions=(0,) * max_new_tokens,
            finish_reason="length",
        )
        return Reply(text="a", completion=said)


def environment(seed: int = 1, **options: float) -> SimEnvironment:
    return SimEnvironment(SimEnvironmentOptions(**options), EnvironmentContext(name="sim", seed=seed))  # type: ignore[arg-type]


async def play(made: SimEnvironment, num_prompts: int, group_size: int) -> tuple[list[int], list[list[float | None]]]:
    client, rewards = Asked(), []
    for index in range(num_prompts):
        prompt = made.prompts("train")[index]
        rewards.append([(await made.episode(prompt, client)).reward for _ in range(group_size)])
    return client.lengths, rewards


async def test_lengths_are_spread_as_stated_and_groups_differ() -> None:
    lengths, rewards = await play(environment(shortest=100, spread=10.0), 400, 8)
    assert 100 <= min(lengths) < 103 and 970 < max(lengths) <= 1000
    # Uniform on a logarithmic scale: the mean is 900 / ln 10, half of them are below the geometric mean.
    assert sum(lengths) / len(lengths) == pytest.approx(900 / math.log(10), rel=0.03)
    assert sum(length < 100 * math.sqrt(10) for length in lengths) / len(lengths) == pytest.approx(0.5, abs=0.03)
    assert 0.45 < sum(map(sum, rewards)) / 3200 < 0.55  # type: ignore[arg-type]
    rates = [sum(group) for group in rewards]  # type: ignore[arg-type]
    assert sum(0 < rate < 8 for rate in rates) > 300, "most groups have an advantage"
    assert len(set(rates)) > 6, "and are of different difficulty"


async def test_draws_are_the_seeds() -> None:
    first = await play(environment(), 20, 4)
    assert first == await play(environment(), 20, 4) != await play(environment(seed=2), 20, 4)


def test_prompts_are_as_long_as_asked_for() -> None:
    for chars in (16, 200, 333):
        made = environment(prompt_chars=chars)
        texts = [prompt.messages[0]["content"] for split in ("train", "test") for prompt in made.prompts(split)[:3]]
        assert {len(text) for text in texts} == {chars} and len(set(texts)) == 6


def backend(**options: float) -> SimBackend:
    context = BackendContext(model=ModelSpec(), training=TrainingSpec(), accelerator=HostCpu(), seed=1)
    return SimBackend(SimBackendOptions(**options), context)


def batch(*lengths: int) -> Batch:
    rows = tuple(
        Row(
            token_ids=(5,) * length,
            loss_mask=(False,) + (True,) * (length - 1),
            logprobs=(0.0,) + (-0.5,) * (length - 1),
            versions=(-1,) + (0,) * (length - 1),
            advantages=(1.0,) * length,
        )
        for length in lengths
    )
    return Batch(rows=rows, num_tokens=sum(lengths) - len(lengths), num_sequences=len(lengths))


def test_the_backend_takes_its_time_and_says_what_every_backend_says() -> None:
    made = backend(step_s=2.0, s_per_token=0.5)
    assert isinstance(made, Backend)
    with collecting() as bill:
        statistics = made.train_step(batch(4, 6), None)  # type: ignore[arg-type]
        nothing = made.train_step(batch(), None, 0.25)  # type: ignore[arg-type]
        logprobs = made.logprobs(batch(6))
    assert bill == [7.0, 2.0, pytest.approx(1.0)]
    assert {"loss", "grad_norm", "learning_rate", "skipped"} <= statistics.keys()
    assert (statistics["skipped"], nothing["skipped"], nothing["learning_rate"]) == (0.0, 1.0, 0.25)
    assert logprobs == [batch(6).rows[0].logprobs], "engine and trainer are one policy"


def test_the_backend_saves_and_loads_its_numbers(tmp_path: Path) -> None:
    made, again = backend(save_s=3.0), backend()
    with collecting() as bill:
        made.train_step(batch(4), None)  # type: ignore[arg-type]
        made.save(str(tmp_path))
        again.load(str(tmp_path))
        again.save(str(tmp_path / "copy"))
    assert bill[1] == 3.0
    files = [path.read_text() for path in sorted(tmp_path.rglob("*.json"))]
    assert len(files) == 2 and files[0] == files[1] != ""
    (tmp_path / "model" / "simulated.json").write_text("{")
    with pytest.raises(JournalError, match="cannot be read"):
        again.load(str(tmp_path))


def test_both_halves_of_a_transfer_take_the_plans_time_and_agree() -> None:
    sent = transfer("stage", 7, transfer_s=4.0)
    with collecting() as bill:
        receipt = backend().send(sent)
    assert bill == [4.0]
    seconds, checksums = receive_s(sent, "engine-0")
    assert seconds == 4.0 and checksums == receipt.checksums
    assert receive_s(transfer("stage", 8), "engine-0")[1] != checksums


def test_real_weights_and_late_transfers_are_refused() -> None:
    resharder = SimResharder(SimReshardOptions(transfer_s=400.0), "")
    assert isinstance(resharder, Resharder)
    with pytest.raises(TransferFailed, match="carries no weights and the engine on here"):
        resharder.plan(SIM_LAYOUT, [Layout(host="here")])
    plan = resharder.plan(SIM_LAYOUT, [SIM_LAYOUT])
    with pytest.raises(TransferFailed, match="takes 400 s and has 300 s"):
        resharder.sender(plan).send(1, (), 300.0)
    with pytest.raises(TransferFailed, match="carries no weights"):
        next(iter(resharder.receiver(plan, 0).receive(1, 300.0)))
