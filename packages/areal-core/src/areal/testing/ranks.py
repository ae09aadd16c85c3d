"""Several ranks in processes of their own that get the same calls, as the trainer's workers do."""

from __future__ import annotations

import multiprocessing
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from areal.contracts.component import import_object

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

START_S = 240.0
"""For a process to import what it needs, on a loaded machine."""
CALL_S = 120.0
AFTER_FAILURE_S = 10.0
"""How long the other ranks may take once one has failed."""

PRELOADED = ["torch.distributed.fsdp", "torch.distributed.pipelining", "transformers.modeling_utils"]
"""Imported once, in the process that all ranks are forked from: for each of them it would take seconds."""


class RankFailed(Exception):
    """Invariant: says which rank failed, with its traceback; errors of AReaL are raised as they are instead."""


class RankDied(RankFailed):
    """Invariant: the process is gone."""


def free_rendezvous() -> str:
    """Return ``host:port`` where nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class Ranks:
    """Invariant: every call goes to all ranks at once and ends: with each rank's value, an error, or TimeoutError."""

    def __init__(self, num_ranks: int, factory: str, args_of: Callable[[int], Sequence[Any]]) -> None:
        """Start processes; rank r holds ``factory(*args_of(r))``, a dotted path ``module:name``. Raises as `call`."""
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.is_in_step = True
        """Whether every rank has answered every call; if not, an answer to come would be taken for another's."""
        self._pipes: list[Connection] = []
        self.processes: list[Any] = []
        for _ in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)
        try:
            self._values([("", (factory, tuple(args_of(rank)))) for rank in range(num_ranks)], START_S)
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *args: Any, deadline_s: float = CALL_S) -> list[Any]:
        """Call a method on all ranks and return their values by rank.

        Raises the first rank's error when a rank raises one of AReaL's, RankFailed for others, TimeoutError for
        silence.
        """
        return self._values([(method, args)] * len(self._pipes), deadline_s)

    def outcomes(self, method: str, *args: Any, deadline_s: float = CALL_S) -> list[Any]:
        """Return by rank what `call` would, or the error in its place: for ranks of which some are to be lost."""
        return self._exchange([(method, args)] * len(self._pipes), deadline_s)

    def close(self) -> None:
        """End all processes. Idempotent."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self.processes, self._pipes = [], []

    def _values(self, messages: Sequence[tuple[str, tuple[Any, ...]]], deadline_s: float) -> list[Any]:
        answers = self._exchange(messages, deadline_s)
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        # A rank that failed leaves the others waiting for it; its own error says more.
        for failure in sorted(failures, key=lambda error: isinstance(error, TimeoutError)):
            raise failure
        return answers

    def _exchange(self, messages: Sequence[tuple[str, tuple[Any, ...]]], deadline_s: float) -> list[Any]:
        end = time.monotonic() + deadline_s
        self.is_in_step = False
        for pipe, message in zip(self._pipes, messages, strict=True):
            pipe.send(message)
        answers: list[Any] = []
        for rank, pipe in enumerate(self._pipes):
            answers.append(_answer(rank, pipe, end, deadline_s))
            if isinstance(answers[-1], BaseException):
                end = min(end, time.monotonic() + AFTER_FAILURE_S)
        self.is_in_step = not any(isinstance(answer, TimeoutError | RankDied) for answer in answers)
        return answers


def _answer(rank: int, pipe: Connection, end: float, deadline_s: float) -> Any:
    """Return a rank's value or error."""
    if not pipe.poll(max(0.0, end - time.monotonic())):
        return TimeoutError(f"rank {rank} did not answer within {deadline_s:g} s")
    try:
        return pipe.recv()
    except EOFError:
        return RankDied(f"rank {rank} died")


def _serve(connection: Connection) -> None:
    """Make the object, then do what the parent asks until it hangs up; the body of a child process."""
    from areal.errors import ArealError

    held: Any = None
    while True:
        try:
            method, args = connection.recv()
        except EOFError:
            return
        try:
            if method:
                answer = getattr(held, method)(*args)
            else:
                factory, made_of = args
                held, answer = import_object(factory)(*made_of), None
        except ArealError as error:
            answer = error
        except BaseException:
            answer = RankFailed(traceback.format_exc())
        connection.send(answer)
