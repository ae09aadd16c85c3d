"""The front door: every hook there is. Offers list components, questions are answered by the first that knows,
announcements tell plugins what happened. Implementations are loaded from the entry-point group ``areal``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from click import Group

    from areal.contracts.component import Component
    from areal.contracts.finding import Finding
    from areal.contracts.messages import StepReport, Version
    from areal.contracts.run import RunInfo
    from areal.contracts.transfer import Layout

hookspec = pluggy.HookspecMarker("areal")
hookimpl = pluggy.HookimplMarker("areal")


@hookspec
def areal_engines() -> Iterable[Component]:  # type: ignore[empty-body]
    """Offer inference engines (contract `areal.contracts.engine.Engine`)."""


@hookspec
def areal_backends() -> Iterable[Component]:  # type: ignore[empty-body]
    """Offer training backends (contract `areal.contracts.backend.Backend`)."""


@hookspec
def areal_resharders() -> Iterable[Component]:  # type: ignore[empty-body]
    """Offer ways for weights from trainer to engines (contract `areal.contracts.resharder.Resharder`)."""


@hookspec
def areal_accelerators() -> Iterable[Component]:  # type: ignore[empty-body]
    """Offer devices (contract `areal.contracts.accelerator.Accelerator`)."""


@hookspec
def areal_environments() -> Iterable[Component]:  # type: ignore[empty-body]
    """Offer tasks with rewards (contract `areal.contracts.environment.Environment`)."""


@hookspec
def areal_algorithms() -> Iterable[Component]:  # type: ignore[empty-body]
    """Offer learning algorithms (contract `areal.contracts.algorithm.Algorithm`)."""


@hookspec
def areal_trackers() -> Iterable[Component]:  # type: ignore[empty-body]
    """Offer places where metrics go (contract `areal.contracts.tracker.Tracker`)."""


@hookspec
def areal_clusters() -> Iterable[Component]:  # type: ignore[empty-body]
    """Offer ways to run workers (contract `areal.contracts.cluster.Cluster`)."""


@hookspec
def areal_findings() -> Iterable[Finding]:  # type: ignore[empty-body]
    """Tell `areal doctor` what this plugin found: patches, libraries, drivers."""


@hookspec(firstresult=True)
def areal_detect_accelerator() -> str | None:
    """Name the accelerator of this machine, or return None to pass."""


@hookspec(firstresult=True)
def areal_choose_resharder(source: Layout, target: Layout) -> str | None:
    """Name the resharder for the road from `source` to `target`, or return None to pass."""


@hookspec
def areal_engine_process(name: str) -> None:
    """Called inside the process of engine `name` before its library is imported: the home of monkey-patches."""


@hookspec
def areal_commands(group: Group) -> None:
    """Add commands to `group`, the click group behind `areal`."""


@hookspec
def areal_run_started(run: RunInfo) -> None:
    """Called once on the controller when all workers are up, before the first prompt."""


@hookspec
def areal_step_finished(report: StepReport) -> None:
    """Called on the controller after each training step."""


@hookspec
def areal_weights_published(version: Version) -> None:
    """Called on the controller after every engine has committed `version`."""
