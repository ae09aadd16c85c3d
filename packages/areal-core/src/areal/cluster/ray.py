"""Every worker a Ray actor, on one machine or many; restarts and retries are the controller's, never Ray's."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import pickle
import re
import secrets
import shlex
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from pydantic import Field
from ray.exceptions import RayError

from areal import env
from areal.cluster.host import CANCEL, Call, Host, Kind, Result, collect_rarely
from areal.contracts.cluster import WorkerDeath, WorkerSpec
from areal.contracts.options import Options
from areal.errors import WorkerDied, WorkerFailed

LOG_TAIL_LINES = 30
SPAWN_DEADLINE_S = 300.0
"""A worker imports torch and its engine while others do the same on a small machine."""
CLOSE_DEADLINE_S = 5.0
"""A worker that is busy for longer is ended without being asked."""


class RayOptions(Options):
    """Invariant: without an address a cluster is made for this run and ends with it."""

    address: str = ""
    """Head of an existing Ray cluster, or ``auto``; empty starts one on this machine."""
    object_store_mb: int = Field(default=128, ge=80)
    """Shared memory of a cluster started here; messages between stages are small."""


class RayHandle:
    """A worker that is a Ray actor. Invariant: each open call ends when its result, its deadline or the death comes.

    It can be sent to other workers, where it opens a mailbox of its own.
    """

    def __init__(self, name: str, actor: Any, log_file: str) -> None:
        self.name = name
        self._actor = actor
        self._log_file = log_file
        self._caller = uuid.uuid4().hex  # an id that comes again would be given the earlier handle's results
        self._ids = itertools.count()
        self._open: dict[int, Callable[[Result], None]] = {}
        self._outgoing: list[Call] = []
        self._collector: asyncio.Task[None] | None = None
        self._death: WorkerDied | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RayHandle, (self.name, self._actor, self._log_file)

    async def call(self, method: str, *args: Any, deadline_s: float | None = None) -> Any:
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        call_id = self._send(method, args, lambda result: None if answer.done() else answer.set_result(result))
        try:
            async with asyncio.timeout(deadline_s):
                _, kind, value = await answer
        except TimeoutError:
            self._cancel(call_id)
            raise WorkerFailed(f"{self.name} did not answer {method!r} within {deadline_s:g} s") from None
        except asyncio.CancelledError:
            self._cancel(call_id)
            raise
        finally:
            self._open.pop(call_id, None)
        return self._opened(method, kind, value)

    async def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        results: asyncio.Queue[Result] = asyncio.Queue()
        call_id = self._send(method, args, results.put_nowait)
        ended = False
        try:
            while True:
                _, kind, value = await results.get()
                ended = kind != "item"
                item = self._opened(method, kind, value)
                if ended:
                    return
                yield item
        finally:
            self._open.pop(call_id, None)
            if not ended:
                self._cancel(call_id)

    async def close(self) -> None:
        """Ask the worker to give back what outlives its process, such as shared memory."""
        with suppress(RayError, TimeoutError):
            await asyncio.wait_for(self._actor.close.remote(), CLOSE_DEADLINE_S)

    pid = 0
    node = "here"

    async def ping(self, deadline_s: float) -> bool:
        try:
            await self.call("nothing_temporary", deadline_s=deadline_s)
        except WorkerFailed as error:
            return "AttributeError" in str(error)
        return True

    async def stacks(self, deadline_s: float) -> str:
        return ""

    async def kill(self) -> None:
        self._death = WorkerDied(f"{self.name} was ended by the controller")
        ray.kill(self._actor, no_restart=True)
        self._fail_open(self._death)

    def _opened(self, method: str, kind: Kind, pickled: bytes) -> Any:
        try:
            value = pickle.loads(pickled)
        except Exception as error:
            raise WorkerFailed(f"the answer of {self.name} to {method!r} cannot be read here: {error}") from error
        if kind == "error":
            raise value
        return value

    def _send(self, method: str, args: tuple[Any, ...], deliver: Callable[[Result], None]) -> int:
        if self._death is not None:
            raise self._death
        try:
            arguments = pickle.dumps(args)
        except Exception as error:
            raise WorkerFailed(f"{self.name} cannot be sent the arguments of {method!r}: {error}") from error
        call_id = next(self._ids)
        self._open[call_id] = deliver
        self._post((call_id, method, arguments))
        if self._collector is None or self._collector.done():
            self._collector = asyncio.create_task(self._collect())
        return call_id

    def _post(self, call: Call) -> None:
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(call)

    def _flush(self) -> None:
        calls, self._outgoing = self._outgoing, []
        # A worker that is gone is noticed by the collector.
        self._actor.submit.remote(self._caller, calls)

    def _cancel(self, call_id: int) -> None:
        self._post((call_id, CANCEL, b""))

    async def _collect(self) -> None:
        try:
            while self._open:
                for result in await self._actor.collect.remote(self._caller):
                    if deliver := self._open.get(result[0]):
                        deliver(result)
                # Let the callers take what came before asking whether anybody still waits.
                await asyncio.sleep(0)
        except RayError as error:
            self._death = self._death or WorkerDied(f"{self.name} died: {death_reason(error, self._log_file)}")
            self._fail_open(self._death)

    def _fail_open(self, death: WorkerDied) -> None:
        for call_id, deliver in self._open.items():
            deliver((call_id, "error", pickle.dumps(death)))


class RayCluster:
    """Cluster ``ray``. Invariant: every death is reported once, with the log's last lines."""

    def __init__(self, options: RayOptions, run_dir: str) -> None:
        self._options = options
        self._log_dir = Path(run_dir) / "logs"
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._handles: dict[str, RayHandle] = {}
        self._lifelines: dict[str, asyncio.Task[None]] = {}
        self._deaths: asyncio.Queue[WorkerDeath] = asyncio.Queue()

    async def start(self) -> None:
        """Connect to Ray, or start it on this machine; WorkerFailed in one sentence."""
        collect_rarely()
        logging.getLogger("ray").setLevel(logging.ERROR)
        env.setdefault({"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"})
        try:
            # In the main thread: Ray's processes end when the thread that started them ends.
            self._connect()
        except (ConnectionError, RuntimeError, RayError, ValueError, TimeoutError) as error:
            where = self._options.address or "this machine"
            raise WorkerFailed(f"Ray could not be started on {where}: {error}") from error

    def _connect(self) -> None:
        common: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "logging_level": logging.ERROR}
        if self._options.address:
            ray.init(address=self._options.address, **common)
        else:
            # A token of this run's own: nobody else's process joins, and nothing is written into the user's home.
            env.setdefault({"RAY_AUTH_TOKEN": secrets.token_hex(32)})
            ray.init(
                address="local",  # and not one that happens to run on this machine
                num_cpus=os.cpu_count() or 1,
                resources={"train": 1024, "infer": 1024},
                include_dashboard=False,
                object_store_memory=self._options.object_store_mb << 20,
                _node_ip_address="127.0.0.1",
                **common,
            )

    async def spawn(self, spec: WorkerSpec) -> RayHandle:
        self._check_resources(spec)
        log_file = str(self._log_dir / f"{spec.name}.log") if not self._options.address else ""
        wanted = dict(spec.resources)
        num_gpus = wanted.pop("GPU", 0)
        remote_host: Any = ray.remote(Host)
        host = remote_host.options(
            num_cpus=wanted.pop("CPU", 0),
            num_gpus=num_gpus,
            resources=wanted,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=1000,
            runtime_env=runtime_env(spec.python),
        )
        try:
            actor = host.remote(spec, log_file)
        except TypeError as error:
            said = str(error).splitlines()[0]
            raise WorkerFailed(f"{spec.name} did not start, its arguments cannot be sent: {said}") from error
        try:
            problem: str = await asyncio.wait_for(actor.build.remote(), SPAWN_DEADLINE_S)
        except TimeoutError:
            problem = f"it was not ready within {SPAWN_DEADLINE_S:g} s, its log is {log_file}"
        except RayError as error:
            problem = death_reason(error, log_file)
        if problem:
            ray.kill(actor)
            raise WorkerFailed(f"{spec.name} did not start: {problem}")
        handle = RayHandle(spec.name, actor, log_file)
        self._handles[spec.name] = handle
        self._lifelines[spec.name] = asyncio.create_task(self._hold_lifeline(handle, actor))
        return handle

    def _check_resources(self, spec: WorkerSpec) -> None:
        # Ray queues an infeasible actor for ever without a word.
        there = ray.cluster_resources()
        for name, wanted in spec.resources.items():
            if wanted > there.get(name, 0):
                raise WorkerFailed(
                    f"{spec.name} needs {wanted:g} {name!r}, and the Ray cluster has {there.get(name, 0):g}; "
                    f"start a node with it (ray start --resources='{{\"{name}\": {wanted:g}}}') or change 'resources'"
                )

    async def _hold_lifeline(self, handle: RayHandle, actor: Any) -> None:
        """Report the death of a worker, and end the process of one that has ended by itself."""
        try:
            reason = with_tail(await actor.lifeline.remote(), handle._log_file)
            ray.kill(actor, no_restart=True)
        except RayError as error:
            reason = death_reason(error, handle._log_file)
        self._handles.pop(handle.name, None)
        handle._death = handle._death or WorkerDied(f"{handle.name} died: {reason}")
        handle._fail_open(handle._death)
        self._deaths.put_nowait(WorkerDeath(name=handle.name, reason=reason))

    async def watch(self) -> AsyncIterator[WorkerDeath]:
        while True:
            yield await self._deaths.get()

    async def close(self) -> None:
        for task in self._lifelines.values():
            task.cancel()
        await asyncio.gather(*self._lifelines.values(), return_exceptions=True)
        handles = list(self._handles.values())
        try:
            await asyncio.gather(*(handle.close() for handle in handles))
        finally:  # also when the user does not want to wait
            for handle in handles:
                await handle.kill()
            await asyncio.to_thread(ray.shutdown)


def runtime_env(python: str) -> dict[str, str] | None:
    """Return what makes Ray start a worker with another interpreter; Ray hands the path to a shell as it is.

    The worker's modules come from that interpreter's own environment: of the controller it is given the working
    folder and the script's, and what PYTHONPATH says.
    """
    return {"py_executable": shlex.quote(python)} if python else None


def death_reason(error: RayError, log_file: str) -> str:
    """Return why an actor died: Ray's exit type and detail without its advice, and the log's last lines."""
    said = " ".join(str(error).split())
    found = re.search(r"Worker exit type: (\w+) Worker exit detail: (.*?)(?= Some common causes|$)", said)
    reason = f"{found[1]}, {found[2].rstrip('.')}" if found else said
    return with_tail(reason, log_file)


def with_tail(reason: str, log_file: str) -> str:
    """Return the reason with the log's last lines behind it, if there are any."""
    tail = _tail(log_file)
    return f"{reason}; its log ends with:\n{tail}" if tail else reason


def _tail(log_file: str) -> str:
    if not log_file:
        return ""
    try:
        with Path(log_file).open(errors="replace") as lines:
            return "".join(deque(lines, maxlen=LOG_TAIL_LINES)).rstrip()
    except OSError:
        return ""
