"""Updates beside the next work: the same bits as in the step, waited for by whoever needs them, and no error lost."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp2_trainers import BATCHES, Trainer, Trainers, context_of

from areal.algorithms.grpo import Grpo
from areal.algorithms.ppo import ValueLoss
from areal.contracts.messages import Batch
from areal.contracts.specs import AmpSpec
from areal.contracts.transfer import Transfer
from areal.errors import WorkerFailed
from areal.testing.transfer import FOLDER_RESHARDER, FolderOptions, FolderResharder
from areal_fsdp2.backend import Fsdp2Backend
from areal_fsdp2.options import Fsdp2Options
from areal_fsdp2.updates import Unit

pytestmark = pytest.mark.timeout(300)

LORA = {"rank": 4, "target_modules": ("q_proj", "down_proj")}
Start = Callable[..., Fsdp2Backend]


@pytest.fixture
def start(model_path: str) -> Iterator[Start]:
    """Return the function that starts a backend on one rank, in this process."""
    started: list[Fsdp2Backend] = []

    def backend(options: dict[str, Any] | None = None, **training: Any) -> Fsdp2Backend:
        started.append(Fsdp2Backend(Fsdp2Options(**(options or {})), context_of(model_path, 1, **training)))
        started[-1].start()
        return started[-1]

    yield backend
    for found in started:
        found.close()


def units_of(backend: Fsdp2Backend) -> tuple[Unit, ...]:
    return backend._optimizer._updates.units


def held_up(unit: Unit) -> threading.Event:
    """Let a unit be updated only after an event; the events of a test that fails come by themselves."""
    gate, update = threading.Event(), unit.update

    def late(factor: float, learning_rate: float) -> None:
        gate.wait(20.0)
        update(factor, learning_rate)

    unit.update = late
    return gate


def judged(batch: Batch, factor: float) -> Batch:
    """Return a batch for a policy and for a critic; with an infinite factor its gradient is not finite."""
    rows = [
        replace(
            row,
            advantages=tuple(factor * advantage for advantage in row.advantages),
            returns=tuple(factor * advantage for advantage in row.advantages),
            values=(0.0,) * len(row.token_ids),
        )
        for row in batch.rows
    ]
    return replace(batch, rows=tuple(rows))


def everything(backend: Fsdp2Backend) -> dict[str, torch.Tensor]:
    """Return weights, moments and their counts."""
    backend._started()
    found = {f"{kind}/{part.name}": part.view.clone() for kind, parts in backend._kinds().items() for part in parts}
    return found | {f"step/{name}": torch.tensor(step) for name, step in backend._trained.steps().items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("options", "training"),
    [
        pytest.param({}, {"grad_clip": 0.05}, id="clipped"),
        pytest.param({"cpu_offload": True}, {"micro_batch_tokens": 1000}, id="offloaded"),
        pytest.param({}, {"amp": AmpSpec(enabled=True, dtype="fp16")}, id="scaled"),
        pytest.param({}, {"activation_checkpointing": True, "grad_clip": 0.0}, id="recomputed"),
        pytest.param({"lora": LORA}, {}, id="lora"),
        pytest.param({}, {"role": "critic"}, id="critic"),
    ],
)
def test_not_a_bit_differs(start: Start, options: dict[str, Any], training: dict[str, Any]) -> None:
    loss: Any = ValueLoss(None) if "role" in training else Grpo()
    batches = [judged(batch, math.inf if number == 1 else 1.0) for number, batch in enumerate(BATCHES[:4])]
    beside, within = start(options, **training), start({**options, "overlap_update": False}, **training)
    assert len(units_of(beside)) > 1 and len(units_of(within)) == 1
    steps = [within.train_step(batch, loss) for batch in batches]
    assert [step["skipped"] for step in steps] == [0.0, 1.0, 0.0, 0.0]
    assert repr([beside.train_step(batch, loss) for batch in batches]) == repr(steps)  # with NaN
    assert beside.logprobs(BATCHES[4]) == within.logprobs(BATCHES[4])
    assert_same(everything(beside), everything(within))


@pytest.mark.parametrize("options", [{}, {"tp": 2}, {"sp": 2}, {"pp": 2}, {"ep": 2}], ids=str)
def test_not_a_bit_differs_on_two_ranks(
    two: Trainers, model_path: str, moe_path: str, options: dict[str, Any], tmp_path: Path
) -> None:
    def made_of(overlaps: bool) -> tuple[Trainer, Any]:
        trainer = two.start(moe_path if "ep" in options else model_path, {**options, "overlap_update": overlaps})
        if overlaps:
            trainer.each("delay", 0)
        steps = trainer.steps(BATCHES[:3])
        trainer.save(tmp_path / str(overlaps))
        return trainer, (steps, trainer.do("logprobs", BATCHES[3]))

    (beside, found), (within, expected) = made_of(True), made_of(False)
    assert found == expected
    published = within.published()
    assert_same(beside.published(), published)
    # What one has saved the other goes on from, in the same way.
    beside.do("load", str(tmp_path / "False"))
    within.do("load", str(tmp_path / "True"))
    assert beside.steps(BATCHES[4:]) == within.steps(BATCHES[4:])
    assert_same(beside.published(), within.published())


def test_the_next_step_begins_while_layers_are_still_updated(start: Start) -> None:
    backend, other = start(), start({"overlap_update": False})
    gate = held_up(units_of(backend)[-1])
    first = backend.train_step(BATCHES[0], Grpo())
    assert not gate.is_set()
    entered = threading.Event()
    units_of(backend)[1].module.register_forward_hook(lambda *_: entered.set())
    found: list[Any] = []
    second = threading.Thread(target=lambda: found.append(backend.train_step(BATCHES[1], Grpo())))
    second.start()
    assert entered.wait(10.0), "the first layer did not compute"
    second.join(0.2)
    assert second.is_alive() and not gate.is_set(), "the last layer did not wait for its weights"
    gate.set()
    second.join(60.0)
    assert [first, *found] == [other.train_step(batch, Grpo()) for batch in BATCHES[:2]]


def test_units_are_in_the_order_of_the_forward_pass(start: Start) -> None:
    backend = start()
    order: list[Any] = []
    for unit in units_of(backend):
        unit.module.register_forward_pre_hook(lambda module, _: order.append(module))
    backend.logprobs(BATCHES[0])
    assert order[: len(units_of(backend))] == [unit.module for unit in units_of(backend)]
    trained = [
        id(parameter) for adam in backend._optimizer.adams for g in adam.param_groups for parameter in g["params"]
    ]
    assert sorted(trained) == sorted(id(parameter) for parameter in backend._started().parameters())


def frozen(backend: Fsdp2Backend, path: Path, update: Callable[[], None]) -> list[torch.Tensor]:
    update()
    backend.freeze_reference()
    assert backend._reference is not None
    return backend._reference.weights


def exchanged(backend: Fsdp2Backend, path: Path, update: Callable[[], None]) -> list[torch.Tensor]:
    backend.freeze_reference()
    update()
    backend.reference_logprobs(BATCHES[1])
    return [part.view for part in backend._trained.parts]


def saved(backend: Fsdp2Backend, path: Path, update: Callable[[], None]) -> list[torch.Tensor]:
    update()
    backend.save(str(path))
    backend.finish_save()
    backend.load(str(path))
    return list(everything(backend).values())


def loaded(backend: Fsdp2Backend, path: Path, update: Callable[[], None]) -> list[torch.Tensor]:
    backend.save(str(path))
    backend.finish_save()
    update()
    backend.load(str(path))
    return list(everything(backend).values())


def sent(backend: Fsdp2Backend, path: Path, update: Callable[[], None]) -> list[torch.Tensor]:
    layout, options = backend.layout(), FolderOptions(folder=str(path))
    resharder = FolderResharder(options, "")
    plan = resharder.plan(layout, [layout])
    update()
    backend.begin_send(
        Transfer(phase="stage", version=1, resharder=FOLDER_RESHARDER, options=options, plan=plan, deadline_s=60.0)
    )
    backend.train_step(BATCHES[1], Grpo())
    backend.finish_send()
    return [tensor for _, tensor in resharder.receiver(plan, 0).receive(1, 60.0)]


@pytest.mark.parametrize("look", [frozen, exchanged, saved, loaded, sent])
def test_who_looks_at_weights_waits(start: Start, tmp_path: Path, look: Any) -> None:
    beside, within = start(), start({"overlap_update": False})
    gate = held_up(units_of(beside)[-1])

    def update_late() -> None:
        beside.train_step(BATCHES[0], Grpo())
        threading.Timer(0.3, gate.set).start()

    found = look(beside, tmp_path / "beside", update_late)
    assert gate.is_set()
    expected = look(within, tmp_path / "within", lambda: within.train_step(BATCHES[0], Grpo()))
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("asked", ["logprobs", "train_step", "save", "freeze_reference", "layout"])
def test_an_update_that_fails_is_told_to_whoever_comes_next(start: Start, tmp_path: Path, asked: str) -> None:
    backend = start()

    def fail(factor: float, learning_rate: float) -> None:
        raise MemoryError

    units_of(backend)[1].update = fail
    backend.train_step(BATCHES[0], Grpo())
    args = {"logprobs": (BATCHES[1],), "train_step": (BATCHES[1], Grpo()), "save": (str(tmp_path),)}.get(asked, ())
    for _ in range(2):
        with pytest.raises(WorkerFailed, match=r"the update of the weights failed \(MemoryError\)") as caught:
            getattr(backend, asked)(*args)
        assert isinstance(caught.value.__cause__, MemoryError)


def test_an_update_that_does_not_end_has_a_deadline(start: Start) -> None:
    backend = start(step_timeout_s=1.0)
    gate = held_up(units_of(backend)[-1])
    backend.train_step(BATCHES[0], Grpo())
    with pytest.raises(WorkerFailed, match="the update of the weights did not end within 1 s"):
        backend.logprobs(BATCHES[1])
    gate.set()


def test_closing_ends_the_update(start: Start) -> None:
    backend = start()
    gate = held_up(units_of(backend)[-1])
    backend.train_step(BATCHES[0], Grpo())
    thread = backend._optimizer._updates._thread
    assert thread is not None
    threading.Timer(0.2, gate.set).start()
    backend.close()
    assert gate.is_set()
    for worker in thread._threads:
        worker.join(10.0)
        assert not worker.is_alive()
