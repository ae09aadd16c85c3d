"""From groups to updates: what the backend is asked for, with a backend that only takes notes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from flow_samples import make_group, make_trajectory, make_turn

from areal.contracts.algorithm import Needs
from areal.contracts.component import Component
from areal.contracts.messages import Batch, Group, Outcome, Row, Trajectory
from areal.contracts.specs import BackendContext, ModelSpec, TrainingSpec
from areal.contracts.transfer import Layout, Plan, Transfer
from areal.errors import JournalError
from areal.flow.trainer.worker import TrainerWorker, TrainRequest


class NotingBackend:
    """Invariant: `calls` names every call in order, with its batch."""

    last: NotingBackend

    def __init__(self, options: Any, context: BackendContext) -> None:
        self.options, self.context = options, context
        self.calls: list[tuple[str, Any]] = []
        NotingBackend.last = self

    def start(self) -> None:
        self.calls.append(("start", None))

    def layout(self) -> Layout:
        return Layout(host="here")

    def logprobs(self, batch: Batch) -> list[tuple[float, ...]]:
        self.calls.append(("logprobs", batch))
        return [tuple(-float(row.token_ids[-1]) if kept else 0.0 for kept in row.loss_mask) for row in batch.rows]

    def train_step(self, batch: Batch, loss: Any, learning_rate: float | None = None) -> Mapping[str, float]:
        self.calls.append(("train_step", (batch, loss, learning_rate)))
        return {"loss": float(len(batch.rows)), "grad_norm": 1.0, "clip/share": 0.5}

    def send(self, transfer: Any) -> Any:
        return ("sent", transfer)

    def save(self, path: str) -> None:
        self.calls.append(("save", path))

    def load(self, path: str) -> None:
        self.calls.append(("load", path))

    @property
    def batches(self) -> list[Batch]:
        return [what[0] for name, what in self.calls if name == "train_step"]


class CentredAlgorithm:
    def __init__(self, options: Mapping[str, Any]) -> None:
        self.needs = Needs(**options)

    def advantages(self, group: Group) -> Sequence[float]:
        rewards = [trajectory.outcome.reward for trajectory in group.trajectories]
        known = [reward for reward in rewards if reward is not None]
        return [0.0 if reward is None else reward - sum(known) / len(known) for reward in rewards]


class Imitation:
    needs = Needs(advantage=False)

    def __init__(self, options: Any) -> None: ...


BACKEND = Component(name="noting", factory=f"{__name__}:NotingBackend")
ALGORITHM = Component(name="centred", factory=f"{__name__}:CentredAlgorithm")


def make_worker(*, minibatches: int = 1, temperature: float = 0.5, **options: Any) -> tuple[TrainerWorker, Any]:
    training = TrainingSpec(minibatches=minibatches)
    context = BackendContext(model=ModelSpec(), training=training, accelerator=None, seed=3)  # type: ignore[arg-type]
    worker = TrainerWorker(BACKEND, {"some": "options"}, context, ALGORITHM, options, temperature)
    worker.make()
    return worker, NotingBackend.last


def make_sample(number: int, sample: int, alike: bool) -> Trajectory:
    turn = make_turn((1, 2), (3,) * (sample + 1) + (100 + 10 * number + sample,), version=number)
    return make_trajectory(number, sample, reward=0.5 if alike else float(sample), turns=[turn])


def groups(num_groups: int = 3, num_samples: int = 4) -> tuple[Group, ...]:
    """Every row has a last token of its own; the last group is all alike, so it has no advantage."""
    return tuple(
        make_group(number, [make_sample(number, sample, number == num_groups - 1) for sample in range(num_samples)])
        for number in range(num_groups)
    )


def request(step: int = 1, oldest: int | None = None, made: tuple[Group, ...] | None = None) -> TrainRequest:
    return TrainRequest(step=step, version=step - 1, groups=made or groups(), oldest_version=oldest)


def last_tokens(rows: Sequence[Row]) -> list[int]:
    return [row.token_ids[-1] for row in rows]


def test_a_request_follows_from_its_step_and_groups() -> None:
    made = groups(num_groups=2)
    assert TrainRequest.of(7, list(made), masked_beyond=None) == TrainRequest(step=7, version=6, groups=made)
    asked = TrainRequest.of(7, made, masked_beyond=2)
    assert asked == TrainRequest(step=7, version=6, groups=made, oldest_version=4)
    assert TrainRequest.of(1, made, masked_beyond=0).oldest_version == 0


def test_what_cannot_be_written_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worker, _ = make_worker()

    def full(path: str) -> None:
        raise RuntimeError("unexpected pos 64 vs 0\nC++ frames follow")

    monkeypatch.setattr(worker._backend, "save", full, raising=False)
    with pytest.raises(
        JournalError, match=r"could not write into the run's folder: RuntimeError: unexpected pos 64 vs 0$"
    ):
        worker.save(str(tmp_path))
    with pytest.raises(JournalError, match=r"could not write into the run's folder: NotADirectoryError: .*"):
        worker.prepare("os:mkdir", "/dev/null/model")


def test_start_prepare_save_load() -> None:
    worker, backend = make_worker()
    assert backend.options == {"some": "options"}
    assert worker.start() == Layout(host="here")
    worker.save("there")
    worker.load("back")
    assert backend.calls == [("start", None), ("save", "there"), ("load", "back")]
    assert worker.prepare("math:gcd", 12, 18) == 6


class SendingBackend(NotingBackend):
    """Goes on while it sends. Invariant: `sent` is what was begun and what was finished, in order."""

    def begin_send(self, transfer: Any) -> None:
        self.sent = [f"begun {transfer.version}"]

    def finish_send(self) -> Any:
        self.sent.append(f"finished in {threading.current_thread().name}")
        return "receipt"


@pytest.mark.parametrize("overlaps", [True, False])
async def test_sending(overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(uid="p", source=Layout(host="here"), targets=())
    transfer = Transfer(phase="stage", version=4, resharder=BACKEND, options=None, plan=plan, overlaps=overlaps)
    worker, _ = make_worker()
    worker.begin_send(transfer)
    assert await worker.finish_send() == ("sent", transfer), "a backend that sends in one go"
    monkeypatch.setattr(f"{__name__}.NotingBackend", SendingBackend)
    worker, backend = make_worker()
    worker.begin_send(transfer)
    if overlaps:
        assert await worker.finish_send() == "receipt"
        assert backend.sent[0] == "begun 4" and threading.current_thread().name not in backend.sent[1]
    else:
        assert await worker.finish_send() == ("sent", transfer)


def test_one_update_takes_the_current_policy_as_proximal() -> None:
    worker, backend = make_worker(minibatches=1)
    metrics = worker.train(request())
    assert [name for name, _ in backend.calls] == ["train_step"]
    (batch,) = backend.batches
    assert all(row.proximal_logprobs is None for row in batch.rows)
    assert last_tokens(batch.rows) == [100, 101, 102, 103, 110, 111, 112, 113]
    assert batch.num_sequences == 12 and batch.num_tokens == 3 * (2 + 3 + 4 + 5), "left-out rows are counted"
    assert batch.temperature == 0.5
    assert metrics["train/loss"] == 8.0 and metrics["clip/share"] == 0.5
    assert metrics["rows/without_advantage"] == 4.0 and metrics["staleness/masked_tokens"] == 0.0
    assert metrics["time/train_s"] > 0


def test_minibatches_partition_all_rows_with_proximal_logprobs_from_before_the_first() -> None:
    worker, backend = make_worker(minibatches=4, advantage=False)
    metrics = worker.train(request())
    assert [name for name, _ in backend.calls] == ["logprobs", *["train_step"] * 4]
    everything = backend.calls[0][1]
    assert len(everything.rows) == everything.num_sequences == 12
    batches = backend.batches
    assert [len(batch.rows) for batch in batches] == [3, 3, 3, 3]
    trained = [token for batch in batches for token in last_tokens(batch.rows)]
    assert sorted(trained) == sorted(last_tokens(everything.rows)) and len(set(trained)) == 12
    assert sum(batch.num_tokens for batch in batches) == 42
    for batch in batches:
        assert batch.num_tokens == sum(row.num_loss_tokens for row in batch.rows)
        for row in batch.rows:
            own = -float(row.token_ids[-1])
            assert row.proximal_logprobs == tuple(own if kept else 0.0 for kept in row.loss_mask)
    assert metrics["train/loss"] == 3.0 and metrics["train/grad_norm"] == 1.0, "means over the minibatches"


def test_minibatches_are_shuffled_anew_each_step_and_the_same_in_every_run() -> None:
    def order(step: int) -> list[list[int]]:
        worker, backend = make_worker(minibatches=2, advantage=False)
        worker.train(request(step))
        return [last_tokens(batch.rows) for batch in backend.batches]

    assert order(1) == order(1) != order(2)


def test_rows_without_advantage_are_left_out_of_each_minibatch_while_its_totals_stay() -> None:
    worker, backend = make_worker(minibatches=3)
    metrics = worker.train(request())
    assert sum(len(batch.rows) for batch in backend.batches) == 8
    assert [batch.num_sequences for batch in backend.batches] == [4, 4, 4]
    assert sum(batch.num_tokens for batch in backend.batches) == 42
    assert metrics["rows/without_advantage"] == 4.0


def test_stale_tokens_are_masked_and_counted() -> None:
    worker, backend = make_worker()
    metrics = worker.train(request(step=2, oldest=1))
    (batch,) = backend.batches
    assert metrics["staleness/masked_tokens"] == 14.0
    assert last_tokens(batch.rows) == [110, 111, 112, 113]
    assert (batch.num_tokens, batch.num_sequences) == (28, 12)
    assert metrics["rows/without_advantage"] == 8.0


def test_a_step_in_which_every_episode_failed_is_an_empty_update() -> None:
    failed = make_group(0, [Trajectory(group=0, sample=0, turns=(), outcome=Outcome.error("x"))])
    worker, backend = make_worker(minibatches=2)
    worker.train(request(made=(failed,)))
    assert [(batch.rows, batch.num_tokens, batch.num_sequences) for batch in backend.batches] == [((), 0, 0)] * 2


def test_greedy_sampling_has_unscaled_logprobs() -> None:
    worker, backend = make_worker(temperature=0.0)
    worker.train(request())
    assert backend.batches[0].temperature == 1.0


def test_an_algorithm_with_too_few_advantages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CentredAlgorithm, "advantages", lambda self, group: [1.0])
    worker, _ = make_worker()
    with pytest.raises(ValueError, match="zip"):
        worker.train(request())


def test_warm_up_learns_the_answers_only() -> None:
    worker, backend = make_worker()
    imitation = Component(name="sft", factory=f"{__name__}:Imitation")
    loss = worker.warm_up([((1, 2), (3, 4, 5)), ((6,), (7,))], imitation, 0.125)
    assert loss == 2.0
    (_, (batch, algorithm, rate)) = backend.calls[0]
    assert isinstance(algorithm, Imitation) and rate == 0.125
    first, second = batch.rows
    assert first.token_ids == (1, 2, 3, 4, 5) and first.loss_mask == (False, False, True, True, True)
    assert first.advantages == (0.0, 0.0, 1.0, 1.0, 1.0)
    assert second.loss_mask == (False, True)
    assert (batch.num_tokens, batch.num_sequences, batch.temperature) == (4, 2, 1.0)
