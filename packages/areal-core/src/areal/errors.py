"""The errors a user can meet: one sentence that says what was asked, what exists, what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class ArealError(Exception):
    """A mistake outside AReaL's code; the command line prints it as one line, without a traceback."""


class ConfigError(ArealError):
    """A recipe or an override that cannot be used as written."""


class PluginError(ArealError):
    """A plugin that cannot be loaded, or whose offer cannot be used."""


class UnknownComponent(PluginError):
    """A component's name that nobody offers."""


class MissingLibrary(PluginError):
    """A component whose heavy library is not installed."""


class WorkerFailed(ArealError):
    """A worker process that died, hung past its deadline, or refused to start."""


class WorkerDied(WorkerFailed):
    """A worker process that is gone; whatever it was asked can be asked of another."""


class TrainerLost(WorkerFailed):
    """The trainer's process that is gone or hangs; the run goes back to the newest checkpoint with another."""


class TransferFailed(ArealError):
    """A weight update that did not arrive whole; the previous version stays in force."""


class ParityError(ArealError):
    """Engine and trainer that give the same tokens different probabilities under the same weights."""


class JournalError(ArealError):
    """A run folder or journal that cannot be read or written."""


class RewardBudgetExceeded(ArealError):
    """More episodes ended in errors or time-outs than the run allows."""


def first_line(said: object) -> str:
    """Return the first line of an error or a reason; what follows may be a log."""
    return next(iter(str(said).splitlines()), "")


def did_you_mean(asked: str, existing: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest existing name, or an empty string."""
    near = get_close_matches(asked, list(existing), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
