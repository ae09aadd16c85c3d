"""The reference policy and the critic beside the trainer's backend, with backends that only take notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from flow_samples import make_group, make_trajectory, make_turn

from areal.contracts.algorithm import Needs
from areal.contracts.component import Component
from areal.contracts.messages import Batch, Group, Row
from areal.contracts.specs import BackendContext, ModelSpec, TrainingSpec
from areal.errors import ConfigError, PluginError
from areal.flow.trainer.worker import TrainerWorker, TrainRequest


class Notes:
    """Invariant: `log` names every call of every backend of one trainer, in order."""

    log: ClassVar[list[tuple[str, str, Any]]]
    backends: ClassVar[list[Any]]


class PlainBackend:
    def __init__(self, options: Any, context: BackendContext) -> None:
        self.context = context
        self.name = context.role if context.model.path == "own" else context.model.path
        Notes.backends.append(self)

    def start(self) -> None:
        self._note("start")

    def layout(self) -> str:
        return "layout"

    def logprobs(self, batch: Batch) -> list[tuple[float, ...]]:
        return self._numbers("logprobs", batch, -1.0)

    def train_step(self, batch: Batch, loss: Any, learning_rate: float | None = None) -> Mapping[str, float]:
        self._note("train_step", batch)
        return {"loss": 2.0, "grad_norm": 1.0}

    def send(self, transfer: Any) -> Any:
        return None

    def save(self, path: str) -> None:
        self._note("save", path)

    def load(self, path: str) -> None:
        self._note("load", path)

    def _numbers(self, what: str, batch: Batch, number: float) -> list[tuple[float, ...]]:
        self._note(what, batch)
        return [tuple(number if trained else 0.0 for trained in row.loss_mask) for row in batch.rows]

    def _note(self, what: str, detail: Any = None) -> None:
        Notes.log.append((self.name, what, detail))


class AbleBackend(PlainBackend):
    def freeze_reference(self) -> None:
        self._note("freeze")

    def reference_logprobs(self, batch: Batch) -> list[tuple[float, ...]]:
        return self._numbers("reference_logprobs", batch, -3.0)

    def values(self, batch: Batch) -> list[tuple[float, ...]]:
        return self._numbers("values", batch, 0.5)


class Asking:
    """Needs what its options say, and gives the first trajectory an advantage of 1, all others 0."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.needs = Needs(**options)

    def advantages(self, group: Group) -> Sequence[float]:
        return [float(i == 0) for i in range(len(group.trajectories))]

    def loss(self, logprobs: Any, batch: Any) -> Any: ...


class Critical(Asking):
    critic = "the critic's loss"
    critic_learning_rate: float | None = 0.25

    def refine(self, rows: Sequence[Row]) -> list[Row]:
        """Half of the variance of the returns 1 and 0 is left over by values of 0.5 +- 0.25."""
        return [
            replace(row, returns=tuple(float(row.token_ids[-1] % 2) if kept else 0.0 for kept in row.loss_mask))
            for row in rows
        ]


class Silent:
    def __init__(self, options: Any) -> None: ...


def worker_of(algorithm: str, backend: str = "AbleBackend", minibatches: int = 1, **needs: Any) -> TrainerWorker:
    Notes.log, Notes.backends = [], []
    context = BackendContext(
        model=ModelSpec(path="own"),
        training=TrainingSpec(minibatches=minibatches, learning_rate=0.5),
        accelerator=None,  # type: ignore[arg-type]
        seed=3,
    )
    able = frozenset({"critic"}) if backend == "AbleBackend" else frozenset[str]()
    component = Component(name="noting", factory=f"{__name__}:{backend}", capabilities=able)
    made = Component(name="asking", factory=f"{__name__}:{algorithm}")
    worker = TrainerWorker(component, None, context, made, needs, 1.0)
    worker.make()
    return worker


def request(version: int = 0, num_groups: int = 4) -> TrainRequest:
    groups = [
        make_group(
            number,
            [
                make_trajectory(number, sample, turns=[make_turn((1, 2), (7, 10 * number + sample))])
                for sample in range(2)
            ],
        )
        for number in range(num_groups)
    ]
    return TrainRequest(step=version + 1, version=version, groups=tuple(groups))


def calls() -> list[tuple[str, str]]:
    return [(name, what) for name, what, _ in Notes.log]


def trained() -> list[Batch]:
    return [detail for _, what, detail in Notes.log if what == "train_step"]


def test_actor_0_is_frozen_before_the_first_step_and_never_again() -> None:
    worker = worker_of("Asking", reference="actor@0", advantage=False)
    worker.start()
    worker.train(request(0))
    worker.train(request(1))
    assert len(Notes.backends) == 1, "the reference lives in the policy's backend"
    assert calls() == [
        ("actor", "start"),
        ("actor", "freeze"),
        ("actor", "reference_logprobs"),
        ("actor", "train_step"),
        ("actor", "reference_logprobs"),
        ("actor", "train_step"),
    ]
    first, second = trained()
    assert (first.version, second.version) == (0, 1)
    assert all(row.reference_logprobs == (0.0, 0.0, -3.0, -3.0) for row in (*first.rows, *second.rows))


def test_another_model_is_an_instance_of_its_own() -> None:
    worker = worker_of("Asking", "PlainBackend", reference="elsewhere", advantage=False)
    worker.start()
    worker.train(request(0))
    assert calls() == [
        ("actor", "start"),
        ("elsewhere", "start"),
        ("elsewhere", "logprobs"),
        ("actor", "train_step"),
    ]
    assert trained()[0].rows[0].reference_logprobs == (0.0, 0.0, -1.0, -1.0)


def test_rows_that_will_not_be_read_cost_no_reference() -> None:
    worker = worker_of("Asking", reference="actor@0")
    worker.train(request(0))
    asked = next(detail for _, what, detail in Notes.log if what == "reference_logprobs")
    assert len(asked.rows) == len(trained()[0].rows) == 4 and trained()[0].num_sequences == 8
    assert all(row.reference_logprobs for row in trained()[0].rows)


def test_a_backend_that_keeps_no_reference() -> None:
    with pytest.raises(ConfigError, match="compares with actor@0 and the backend 'noting' keeps no reference"):
        worker_of("Asking", "PlainBackend", reference="actor@0")


def test_the_critic_is_a_second_instance_and_learns_from_all_rows() -> None:
    worker = worker_of("Critical", minibatches=2)
    worker.start()
    actor, critic = (backend.context for backend in Notes.backends)
    assert (actor.role, critic.role) == ("actor", "critic")
    assert (actor.training.learning_rate, critic.training.learning_rate) == (0.5, 0.25)
    assert replace(critic, role="actor", training=actor.training) == actor, "and nothing else differs"
    metrics = worker.train(request(0))
    assert calls()[2:] == [
        ("critic", "values"),
        ("actor", "logprobs"),
        *[("actor", "train_step"), ("critic", "train_step")] * 2,
    ]
    sizes = [(name, len(detail.rows)) for name, what, detail in Notes.log if what == "train_step"]
    assert sum(size for name, size in sizes if name == "actor") == 4
    assert [size for name, size in sizes if name == "critic"] == [4, 4]
    assert all(row.values == (0.0, 0.0, 0.5, 0.5) and row.returns is not None for b in trained() for row in b.rows)
    assert metrics["critic/loss"] == 2.0 and metrics["critic/explained_variance"] == 0.0
    worker.save("there")
    worker.load("back")
    assert Notes.log[-4:] == [
        ("actor", "save", "there"),
        ("critic", "save", "there/critic"),
        ("actor", "load", "back"),
        ("critic", "load", "back/critic"),
    ]


def test_a_critic_without_a_rate_of_its_own_has_the_policys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Critical, "critic_learning_rate")
    worker_of("Critical")
    assert Notes.backends[1].context.training.learning_rate == 0.5


def test_a_backend_that_cannot_be_a_critic() -> None:
    with pytest.raises(ConfigError, match="has a critic and the backend 'noting' cannot be one; use backend torch"):
        worker_of("Critical", "PlainBackend")


def test_groups_stay_whole_where_the_loss_compares_their_rows() -> None:
    worker = worker_of("Asking", minibatches=2, whole_groups=True, advantage=False, proximal=False)
    worker.train(request(0))
    assert [what for _, what in calls()] == ["train_step"] * 2, "and no proximal logprobs were asked for"
    assert [batch.first_update for batch in trained()] == [True, False]
    for batch in trained():
        assert batch.whole_groups
        assert sorted(row.group for row in batch.rows) == sorted(2 * [*{row.group for row in batch.rows}])
    assert {row.group for batch in trained() for row in batch.rows} == {0, 1, 2, 3}


def test_an_algorithm_must_say_what_it_needs() -> None:
    with pytest.raises(PluginError, match="algorithm 'asking' does not say what it needs; give its class"):
        worker_of("Silent")


def test_parity_compares_sampled_tokens_only() -> None:
    worker = worker_of("Asking")
    turn = make_turn((1, 2, 3), (4, 5))
    silent = replace(turn, token_ids=(), logprobs=(), versions=())
    figures = worker.parity([replace(turn, logprobs=(-1.5, -1.0)), silent])
    assert figures["parity/tokens"] == 2.0
    assert figures["parity/mean"] == pytest.approx(0.25) and figures["parity/max"] == pytest.approx(0.5)
