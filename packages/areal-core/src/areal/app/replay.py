"""`replay`: compute a training step again from the journal, and compare it with what was recorded."""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from areal.app.resolve import Resolved, resolve
from areal.app.workers import Workers, with_path
from areal.config import load_recipe
from areal.contracts.cluster import Cluster
from areal.errors import JournalError
from areal.flow.buffer.view import JournalView
from areal.flow.engine.fleet import START_DEADLINE_S
from areal.flow.trainer.seat import TrainerSeat
from areal.flow.trainer.worker import TrainRequest
from areal.monitor.folder import RunFolder
from areal.plugins import discover

Metrics = Mapping[str, float]

_OF_THE_MACHINE = "time/"
"""Begin of the names of metrics that no two computations share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One metric, as it was recorded and as it came out again. Invariant: None is a metric that one of them lacks."""

    name: str
    recorded: float | None
    recomputed: float | None

    def is_equal(self, rtol: float) -> bool:
        """Return whether the two are the same number, or differ by at most the share `rtol` of the larger one."""
        if self.recorded is None or self.recomputed is None:
            return False
        both_nan = math.isnan(self.recorded) and math.isnan(self.recomputed)
        return both_nan or math.isclose(self.recorded, self.recomputed, rel_tol=rtol, abs_tol=0.0)

    @property
    def difference(self) -> float | None:
        if self.recorded is None or self.recomputed is None:
            return None
        return 0.0 if self.recorded == self.recomputed else self.recomputed - self.recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Invariant: `compared` has every metric of the trainer that is recorded or was recomputed, times left out."""

    step: int
    checkpoint: int
    """Step of the checkpoint that the computation began with."""
    on_the_way: tuple[tuple[int, tuple[str, ...]], ...]
    """Steps between the two that came out differently, and their metrics that did."""
    compared: tuple[Compared, ...]
    rtol: float

    @property
    def differing(self) -> tuple[str, ...]:
        return tuple(found.name for found in self.compared if not found.is_equal(self.rtol))

    def show(self, console: Console) -> None:
        title = f"step {self.step}, from the checkpoint of step {self.checkpoint}"
        # Digits that are folded can be read; digits that are cut off cannot.
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        table.add_column("metric", overflow="fold")
        for column in ("recorded", "recomputed", "difference"):
            table.add_column(column, justify="right", overflow="fold")
        for found in self.compared:
            numbers = (found.recorded, found.recomputed, found.difference)
            style = None if found.is_equal(self.rtol) else "bold red"
            table.add_row(found.name, *("-" if number is None else repr(number) for number in numbers), style=style)
        console.print(table)
        for step, names in self.on_the_way:
            console.print(f"step {step}, on the way, differs in {', '.join(names)}", highlight=False, soft_wrap=True)
        differing = self.differing
        within = f" within {self.rtol:g}" if self.rtol else ", bit for bit"
        verdict = f"differs in {', '.join(differing)}" if differing else f"is the same{within}"
        console.print(f"step {self.step} {verdict}", highlight=False, soft_wrap=True)


def replay(
    run: str,
    step: int,
    *,
    runs_dir: str = "runs",
    block: Sequence[str] = (),
    rtol: float = 0.0,
    console: Console | None = None,
) -> Replayed:
    """Compute a step of a run again, with its own trainer and cluster, and show how it compares; nothing is written.

    `rtol`: largest relative difference that counts as equal. Raises ArealError in one sentence.
    """
    folder = RunFolder.find(run, runs_dir)
    plugins = discover(block)
    resolved = resolve(load_recipe(str(folder.config), resolve=plugins.resolve), plugins)
    journal = JournalView(folder.journal)
    try:
        recorded = dict(journal.metrics())
        checkpoint, path = _start_of(step, recorded, journal.checkpoints(), folder)
        computed = asyncio.run(_Again(resolved, folder, block, journal).steps(folder.path / path, checkpoint, step))
    finally:
        journal.close()
    compared = {number: _compare(recorded[number], metrics) for number, metrics in computed.items()}
    differing = {
        number: tuple(one.name for one in found if not one.is_equal(rtol)) for number, found in compared.items()
    }
    replayed = Replayed(
        step=step,
        checkpoint=checkpoint,
        on_the_way=tuple((number, names) for number, names in differing.items() if names and number < step),
        compared=compared[step],
        rtol=rtol,
    )
    replayed.show(console or Console())
    return replayed


def _start_of(
    step: int, recorded: Mapping[int, Metrics], checkpoints: Sequence[tuple[int, str]], folder: RunFolder
) -> tuple[int, str]:
    """Return (step, path) of the newest checkpoint before the step; JournalError names the steps that have one."""
    name, last = folder.path.name, max(recorded, default=0)
    kept = [saved for saved, _ in checkpoints]
    first = min(kept, default=last) + 1
    some = f"steps {first} to {last} can be replayed" if first < last else f"step {last} can be replayed"
    there = some if first <= last else "no step of it can be replayed"
    if step not in recorded:
        done = f"has done the steps 1 to {last}" if last else "has done no step"
        raise JournalError(f"step {step} of {name} cannot be replayed: the run {done}; {there}")
    if before := [(saved, path) for saved, path in checkpoints if saved < step]:
        return before[-1]
    raise JournalError(
        f"step {step} of {name} cannot be replayed: that begins with a checkpoint of step {step - 1} or before, and "
        f"the run has kept {', '.join(map(str, kept)) or 'none'}; {there}; a larger checkpoint.keep, or a smaller "
        "checkpoint.every_steps, lets more of them be replayed"
    )


class _Again:
    """The trainer of a run, once more. Invariant: it is made as the run makes it, and the run's folder is only read."""

    def __init__(self, resolved: Resolved, folder: RunFolder, block: Sequence[str], journal: JournalView) -> None:
        self._resolved = resolved
        self._config = resolved.config
        self._folder = folder
        self._block = block
        self._journal = journal

    async def steps(self, checkpoint: Path, begin: int, end: int) -> dict[int, Metrics]:
        """Return the trainer's metrics of the steps after `begin`, whose checkpoint is given, up to `end`."""
        self._journal_has(begin + 1, end)
        async with AsyncExitStack() as stack:
            elsewhere = stack.enter_context(tempfile.TemporaryDirectory(prefix="areal-replay-"))
            chosen = self._resolved.cluster
            cluster: Cluster = chosen.component.load()(chosen.options, elsewhere)
            stack.push_async_callback(cluster.close)
            await cluster.start()
            trainer = await self._trainer(cluster)
            deadline_s = self._config.training.step_timeout_s
            await trainer.call("load", str(checkpoint), deadline_s=deadline_s)
            return {
                step: await trainer.call("train", self._request(step), deadline_s=deadline_s)
                for step in range(begin + 1, end + 1)
            }

    def _journal_has(self, first: int, last: int) -> None:
        """Read the batches before anything starts: what is damaged is said at once."""
        for step in range(first, last + 1):
            if not self._journal.batch(step):
                raise JournalError(
                    f"step {step} of {self._folder.path.name} cannot be replayed: the journal has no group that it "
                    "trained on; somebody removed rows from the table consumed"
                )

    async def _trainer(self, cluster: Cluster) -> TrainerSeat:
        model = with_path(self._config.model, self._resolved.model_path or str(self._folder.model))
        workers = Workers(self._resolved, model, cluster, self._folder, self._block)
        trainer = TrainerSeat(workers.trainer, workers.num_ranks)
        await trainer.fill()
        await trainer.start(START_DEADLINE_S)
        return trainer

    def _request(self, step: int) -> TrainRequest:
        staleness = self._config.staleness
        masked_beyond = staleness.max if staleness.on_excess == "mask" else None
        return TrainRequest.of(step, self._journal.batch(step), masked_beyond=masked_beyond)


def _compare(recorded: Metrics, recomputed: Metrics) -> tuple[Compared, ...]:
    """Compare all that the trainer reports; what else a run records has other authors."""
    of_trainer = ("train/", "critic/", *(name for name in recomputed if not name.startswith(_OF_THE_MACHINE)))
    names = [name for name in recorded if name.startswith(of_trainer)]
    names += [name for name in recomputed if name not in recorded and not name.startswith(_OF_THE_MACHINE)]
    return tuple(
        Compared(name=name, recorded=recorded.get(name), recomputed=recomputed.get(name)) for name in sorted(names)
    )
