"""The composition root: a recipe and the installed plugins become a running flow; nobody else sees all three."""

from areal.app.replay import replay
from areal.app.resolve import Resolved, at_address, resolve
from areal.app.run import resume, run

__all__ = ["Resolved", "at_address", "replay", "resolve", "resume", "run"]
