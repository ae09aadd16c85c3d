"""Every worker a Ray actor, on one machine or many; restarts and retries are the controller's, never Ray's."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shlex
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from pydantic import Field, PositiveFloat
from ray.exceptions import ActorUnavailableError, RayError

from areal import env
from areal.cluster.host import collect_rarely
from areal.cluster.process import Ending, Process, Remains, remains
from areal.cluster.ray.actor import RayHost
from areal.cluster.ray.handle import BESIDE, RayHandle
from areal.cluster.ray.nodes import run_there, sizes
from areal.cluster.ray.placement import Placement
from areal.cluster.reasons import ENDED_BY_US, root_cause, said_by_ray, with_tail
from areal.contracts.cluster import NEWCOMER_SILENCE_S, Room, WorkerDeath, WorkerSpec
from areal.contracts.options import Options
from areal.errors import WorkerDied, WorkerFailed

BORN_DEADLINE_S = 60.0
"""Ray starts an interpreter, on a machine where many start at once."""
SPAWN_DEADLINE_S = 300.0
"""A worker imports torch and its engine while others do the same on a small machine."""
NODE_LOOK_S = 2.0
"""Between two looks at whether there is still a node on which a process could start."""
AUTOPSY_DEADLINE_S = 10.0
"""Another machine is asked by a task, for which Ray may have to start an interpreter there."""
LAST_WORD_S = 5.0
"""Fast health checks give a machine up sooner; nothing of its worker is awaited meanwhile."""
STATUS_S = 0.5
"""The kernel knows a status once the process has been reaped, moments after its connections broke."""
TOGETHER_S = 3.0
"""Workers that die within this time of another have most likely died of the same."""

NO_NODE_LEFT = "Ray's own process on this machine (raylet) has ended and all workers with it, so none can be started"
"""A cluster that was made for this run gets no other node."""

OWN_CLUSTER = {
    # One busy machine, whose only node must not be given up because it is slow: noticed after some 20 s.
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "4",
}
"""Settings of a cluster that is made for this run."""


SLOW_START = "timed out during startup"
"""What Ray says when its own processes were not there within 30 s."""


class RayOptions(Options):
    """Invariant: without an address a cluster is made for this run and ends with it."""

    address: str = ""
    """Head of an existing Ray cluster, or ``auto``; empty starts one on this machine."""
    object_store_mb: int = Field(default=128, ge=80)
    """Shared memory of a cluster started here; messages between stages are small."""
    reserve_timeout_s: PositiveFloat = 30.0
    """Longest wait for room at the start of the run: nodes that still join, other runs that end."""


class RayCluster:
    """Cluster ``ray``. Invariant: every death is reported once, with its cause and the log's last lines."""

    def __init__(self, options: RayOptions, run_dir: str) -> None:
        self._options = options
        self._log_dir = Path(run_dir).resolve() / "logs"
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._placement = Placement(options.reserve_timeout_s)
        self._handles: dict[str, RayHandle] = {}
        self._lifelines: dict[str, asyncio.Task[str]] = {}
        self._deaths: asyncio.Queue[WorkerDeath | WorkerFailed] = asyncio.Queue()
        self._first_failure: tuple[str, float] | None = None

    async def start(self) -> None:
        """Connect to Ray, or start it on this machine; WorkerFailed in one sentence."""
        collect_rarely()
        logging.getLogger("ray").setLevel(logging.ERROR)
        env.setdefault({"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"})
        try:
            # In the main thread: Ray's processes end when the thread that started them ends.
            self._connect()
        except Exception as error:  # Ray raises a bare one when its processes are not there in time
            if self._options.address or SLOW_START not in str(error):
                raise WorkerFailed(self._why_not_connected(error)) from error
            self._connect_again()

    def _connect_again(self) -> None:
        """Give a machine that is busy a second chance: Ray itself waits 30 s, and no setting changes that."""
        ray.shutdown()
        try:
            self._connect()
        except Exception as error:
            raise WorkerFailed(
                f"{self._why_not_connected(error)} That was the second attempt; the machine is very busy, or short of "
                "memory: try again when it is less so"
            ) from error

    def _connect(self) -> None:
        common: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "logging_level": logging.ERROR}
        if self._options.address:
            ray.init(address=self._options.address, **common)
        else:
            # A token of this run's own: nobody else's process joins, and nothing is written into the user's home.
            # RAY_AUTH_MODE is read when Ray is imported; unset, `init` sets it to token for a new cluster.
            env.setdefault({"RAY_AUTH_TOKEN": secrets.token_hex(32), **OWN_CLUSTER})
            ray.init(
                address="local",  # also where somebody has started another cluster on this machine
                num_cpus=os.cpu_count() or 1,
                resources={"train": 1024, "infer": 1024},
                include_dashboard=False,
                object_store_memory=self._options.object_store_mb << 20,
                _node_ip_address="127.0.0.1",
                **common,
            )

    def _why_not_connected(self, error: Exception) -> str:
        said, address = " ".join(str(error).split()), self._options.address
        if not address:
            return f"Ray could not be started on this machine: {said}"
        if "InvalidAuthToken" in f"{error} {error.__cause__}":
            said = "it does not accept our token; set RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH here as on its nodes"
        return f"the Ray cluster at {address!r} could not be joined: {said}"

    async def reserve(self, rooms: Sequence[Room]) -> Mapping[str, int]:
        return await self._placement.reserve(rooms)

    async def spawn(self, spec: WorkerSpec) -> RayHandle:
        try:
            strategy = await self._placement.take(spec)
            handle, ending = await self._born(spec, strategy)
        except BaseException as error:
            self._placement.give_back(spec.name)
            if isinstance(error, WorkerFailed) and not self._options.address and not await asyncio.to_thread(sizes):
                self._deaths.put_nowait(WorkerFailed(NO_NODE_LEFT))
            raise
        self._handles[spec.name] = handle
        lifeline = asyncio.create_task(self._hold_lifeline(handle, ending))
        self._lifelines[spec.name] = lifeline

        async def explain(_: RayError) -> str:
            return await asyncio.shield(lifeline)

        handle.explain = explain
        return handle

    async def _born(self, spec: WorkerSpec, strategy: Any) -> tuple[RayHandle, Ending]:
        """Start the process and make the component in it; WorkerFailed, or WorkerDied when another may do better."""
        actor = self._actor(spec, strategy)
        process, ending, is_dead = None, None, False
        try:
            async with asyncio.timeout(BORN_DEADLINE_S):
                process = await self._while_node_lives(actor.born.remote())
            ending = Ending(process)
            async with asyncio.timeout(SPAWN_DEADLINE_S):
                problem, is_dead = await _built(actor, process)
        except TimeoutError:
            if process is None:
                problem = f"Ray did not start a process for it within {BORN_DEADLINE_S:g} s"
            else:
                problem = f"it was not ready within {SPAWN_DEADLINE_S:g} s, its log is {process.log_file}"
        except RayError as error:
            problem, is_dead = await self._cause(spec.name, error, process, ending), True
        if not problem and process is not None and ending is not None:
            return RayHandle(spec.name, actor, process), ending
        if process is None:
            ray.kill(actor)
        else:
            await RayHandle(spec.name, actor, process).kill()
        raise (WorkerDied if is_dead else WorkerFailed)(f"{spec.name} did not start: {problem}")

    async def _while_node_lives(self, asked: Any) -> Any:
        """Wait for an answer; WorkerFailed when the run's own node is gone, without which Ray waits for ever."""
        answer = asyncio.wrap_future(asked.future())
        try:
            while not (await asyncio.wait([answer], timeout=NODE_LOOK_S))[0]:
                if not self._options.address and not await asyncio.to_thread(sizes):
                    raise WorkerFailed(NO_NODE_LEFT)
            return await answer
        finally:
            answer.cancel()

    def _actor(self, spec: WorkerSpec, strategy: Any) -> Any:
        wanted = dict(spec.resources)
        num_gpus = wanted.pop("GPU", 0)
        remote: Any = ray.remote  # its type knows no options for classes
        host = remote(concurrency_groups={BESIDE: 8})(RayHost).options(
            num_cpus=wanted.pop("CPU", 0),
            num_gpus=num_gpus,
            resources=wanted,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=1000,
            scheduling_strategy=strategy,
            runtime_env=runtime_env(spec.python),
            enable_task_events=False,  # Ray would keep a record of each of the last 100,000 calls
        )
        try:
            return host.remote(spec, str(self._log_dir), bool(self._options.address))
        except TypeError as error:
            said = str(error).splitlines()[0]
            raise WorkerFailed(f"{spec.name} did not start, its arguments cannot be sent: {said}") from error

    async def _hold_lifeline(self, handle: RayHandle, ending: Ending) -> str:
        """Report the death of a worker and return why; the process of one that has ended by itself is ended."""
        try:
            said = await handle.life()
            reason = with_tail(said, (await self._remains(handle.process)).tail)
        except RayError as first:
            error = await _last_word(handle, first)
            handle.is_gone = not isinstance(error, ActorUnavailableError)
            killed = ENDED_BY_US if handle.was_killed else ""
            reason = killed or await self._cause(handle.name, error, handle.process, ending)
        ending.close()
        handle.died(f"died: {reason}")
        await handle.kill()  # of one that ended by itself, or is out of reach, the process may be there still
        self._handles.pop(handle.name, None)
        self._placement.give_back(handle.name)
        self._deaths.put_nowait(WorkerDeath(name=handle.name, reason=reason))
        return reason

    async def _cause(self, name: str, error: RayError, process: Process | None, ending: Ending | None) -> str:
        """Return why a worker died: the cause in one sentence, and the log's last lines of whoever died first."""
        if process is None or ending is None:
            return said_by_ray(error) or " ".join(str(error).split())
        said = said_by_ray(error, process.node)
        if said == ENDED_BY_US:
            return said
        noticed = time.monotonic()
        first, since = self._first_failure or ("", float("-inf"))
        if noticed - since > TOGETHER_S:
            self._first_failure = (name, noticed)
        found = await self._remains(process)
        if not said and isinstance(error, ActorUnavailableError):
            said = f"its machine {process.node} does not answer any more"
        elif not said:
            status = await _status(ending) if process.is_here else None
            said = root_cause(status, found.words, (process.oom_kills, found.oom_kills))
        if noticed - since <= TOGETHER_S:
            since_s = noticed - since
            return f"{said}; {first} had failed {since_s:.1f} s before and its end says more (log: {process.log_file})"
        return with_tail(said, found.tail)

    async def _remains(self, process: Process) -> Remains:
        """Return what the worker's machine knows, here, or from there when the log is not to be seen from here."""
        if process.is_here or Path(process.log_file).parent == self._log_dir:
            here = await asyncio.to_thread(remains, process)
            if process.is_here:
                return here
        else:
            here = Remains(tail="", words=(), oom_kills=process.oom_kills)
        try:
            return await run_there(process.node_id, AUTOPSY_DEADLINE_S, remains, process)
        except TimeoutError:  # the machine is gone
            return Remains(tail=here.tail, words=here.words, oom_kills=process.oom_kills)

    async def watch(self) -> AsyncIterator[WorkerDeath]:
        while True:
            death = await self._deaths.get()
            if isinstance(death, WorkerFailed):
                raise death
            yield death

    async def close(self) -> None:
        for task in self._lifelines.values():
            task.cancel()
        await asyncio.gather(*self._lifelines.values(), return_exceptions=True)
        handles = list(self._handles.values())
        try:
            await asyncio.gather(*(handle.close() for handle in handles))
        finally:  # also when the user does not want to wait
            await asyncio.gather(*(handle.kill() for handle in handles), return_exceptions=True)
            self._placement.close()
            await asyncio.to_thread(ray.shutdown)


def runtime_env(python: str) -> dict[str, str] | None:
    """Return what makes Ray start a worker with another interpreter; Ray hands the path to a shell as it is.

    The worker's modules come from that interpreter's own environment: of the controller it is given the working
    folder and the script's, and what PYTHONPATH says.
    """
    return {"py_executable": shlex.quote(python)} if python else None


async def _built(actor: Any, process: Process) -> tuple[str, bool]:
    """Make the component; return what went wrong, or an empty string, and whether it stands still."""
    building = asyncio.wrap_future(actor.build.remote().future())
    try:
        while not (await asyncio.wait([building], timeout=NEWCOMER_SILENCE_S / 8))[0]:
            beside = actor.ping.options(concurrency_group=BESIDE).remote()
            if not (await asyncio.wait([asyncio.wrap_future(beside.future())], timeout=NEWCOMER_SILENCE_S))[0]:
                return f"it gave no sign of life for {NEWCOMER_SILENCE_S:g} s, its log is {process.log_file}", True
        return await building, False
    finally:
        building.cancel()


async def _last_word(handle: RayHandle, error: RayError) -> RayError:
    """Return what Ray says once it is sure: of a machine that has just died, and in vain of one that is cut off."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LAST_WORD_S):
            while isinstance(error, ActorUnavailableError):
                try:
                    await handle.life()
                except RayError as later:
                    error = later
                await asyncio.sleep(0.1)
    return error


async def _status(ending: Ending) -> int | None:
    give_up = time.monotonic() + STATUS_S
    while (status := ending.status) is None and time.monotonic() < give_up:  # noqa: ASYNC110 -- nothing announces it
        await asyncio.sleep(0.01)
    return status
