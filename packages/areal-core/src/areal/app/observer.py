"""Who hears of a run: the terminal, the trackers, the plugins."""

from __future__ import annotations

import time
from collections.abc import Mapping

from areal.contracts.messages import StepReport, Version
from areal.errors import first_line
from areal.monitor.folder import RunFolder
from areal.monitor.progress import ProgressView
from areal.monitor.trackers import TrackerGroup
from areal.plugins import Plugins

STEPS_BETWEEN_ALARMS = 20
"""A disagreement that lasts is said again after so many steps."""


class RunObserver:
    """Who hears of steps: the bar, the trackers, the plugins. Invariant: none of them can stop the run."""

    def __init__(self, view: ProgressView, trackers: TrackerGroup, plugins: Plugins, folder: RunFolder) -> None:
        self._view = view
        self._trackers = trackers
        self._plugins = plugins
        self._folder = folder
        self._alarmed_at: int | None = None

    def step_finished(self, report: StepReport) -> None:
        self._view.step_finished(report)
        self._trackers.log(report.step, report.metrics)
        self._plugins.announce("areal_step_finished", report=report)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self._view.say(f"evaluation after step {step}: reward {metrics.get('eval/reward/mean', float('nan')):.3f}")
        self._trackers.log(step, metrics)

    def alarmed(self, step: int, sentence: str) -> None:
        if self._alarmed_at is None or step >= self._alarmed_at + STEPS_BETWEEN_ALARMS:
            self._alarmed_at = step
            self._view.say(f"warning, step {step}: {sentence}")

    def warned(self, sentence: str) -> None:
        self._view.say(f"warning: {sentence}")

    def replaced(self, name: str, reason: str) -> None:
        self._view.say(f"{name} was lost and is replaced: {first_line(reason)}")

    def stalled(self, sentence: str, stacks: str) -> None:
        self._view.say(f"stalled: {sentence}")
        if stacks:
            path = self._folder.path / "logs" / f"stall-{time.strftime('%Y%m%d-%H%M%S')}.txt"
            try:
                path.write_text(f"{sentence}\n\n{stacks}\n", encoding="utf-8")
            except OSError as error:
                self._view.say(f"what they were doing could not be written to {path}: {error.strerror}\n{stacks}")
            else:
                self._view.say(f"what they were doing: {path}")

    def went_back(self, step: int) -> None:
        self._view.say(f"the trainer goes on from the checkpoint of step {step}; engines and finished samples stay")
        self._view.went_back(step)
        self._trackers.rewind(step)

    def weights_published(self, version: Version) -> None:
        self._plugins.announce("areal_weights_published", version=version)
