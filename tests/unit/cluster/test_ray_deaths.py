"""How workers die and hang, and what is said of it: real processes, real signals."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio
from ray_site import Site, spec

from areal.cluster.process import Ending, this_process
from areal.cluster.ray import RayHandle
from areal.contracts.cluster import WorkerDeath, start_of
from areal.errors import WorkerDied, WorkerFailed

pytestmark = pytest.mark.asyncio(loop_scope="module")

MORTAL = "cluster_workers:Mortal"
SAID = {
    "os._exit": "it exited with code 3; its log ends with:",
    "sys.exit": "it exited with code 4; its log ends with:",
    "crash": "it was ended by SIGSEGV; its log ends with:",
    "abort": "it was ended by SIGABRT; its log ends with:",
    "SIGTERM": "it was ended by SIGTERM; its log ends with:",
    "SIGKILL": "killed from outside (SIGKILL): nothing in its log, no out-of-memory event on its machine; its log ends",
}


async def next_death(site: Site) -> WorkerDeath:
    return await asyncio.wait_for(anext(site.cluster.watch()), 30)


@pytest_asyncio.fixture(loop_scope="module")
async def mortal(site: Site) -> AsyncIterator[RayHandle]:
    site.cluster._first_failure = None  # each test's deaths are its own
    made = await site.cluster.spawn(spec("mortal", factory=MORTAL))
    yield made
    if not made.is_gone:
        await made.kill()
        await next_death(site)


@pytest.fixture(params=[True, False], ids=["status known", "log alone"])
def status_known(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Kernels before 6.15, and workers of other machines, leave no status."""
    if not request.param:
        monkeypatch.setattr(Ending, "status", None)
    return request.param


@pytest.mark.parametrize("way", SAID)
async def test_the_cause_comes_first(site: Site, mortal: RayHandle, way: str, status_known: bool) -> None:
    await mortal.call("say", "my last words")
    if status_known and Ending(this_process("", "", os.devnull, -1))._descriptor < 0:
        pytest.skip("this kernel has no pidfd")
    began = time.monotonic()
    with pytest.raises(WorkerDied, match=r"(?s)^mortal died: .*my last words from C"):
        await mortal.call("die", way, deadline_s=30)
    death = await next_death(site)
    said = SAID[way]
    if way == "SIGKILL" and not status_known:
        said = said.replace("(SIGKILL):", "(SIGKILL), as far as anybody can know:")
    assert death.name == "mortal" and death.reason.startswith(said), death.reason
    assert "my last words from C" in death.reason
    assert time.monotonic() - began < 5
    assert not await mortal.ping(1.0)
    assert await mortal.stacks(2.0) == f"process {mortal.pid} on {mortal.node} is gone"


async def test_of_several_the_first_has_the_log(site: Site, mortal: RayHandle) -> None:
    other = await site.cluster.spawn(spec("other", factory=MORTAL))
    await asyncio.gather(mortal.call("say", "the first"), other.call("say", "the second"))
    os.kill(mortal.pid, signal.SIGABRT)
    first = await next_death(site)
    os.kill(other.pid, signal.SIGKILL)
    second = await next_death(site)
    assert first.reason.startswith("it was ended by SIGABRT; its log ends with:") and "the first" in first.reason
    assert second.name == "other" and second.reason.startswith("killed from outside (SIGKILL)")
    assert "mortal had failed 0." in second.reason and "\n" not in second.reason and "other.log" in second.reason


async def test_an_exit_of_the_factory(site: Site) -> None:
    site.cluster._first_failure = None
    with pytest.raises(WorkerFailed, match=r"^new did not start: it exited with code 3; its log ends with:"):
        await site.cluster.spawn(spec("new", factory="cluster_workers:leaves"))
    with pytest.raises(WorkerFailed, match=r"^new did not start: SystemExit: 4$"):
        await site.cluster.spawn(spec("new", 4, factory="sys:exit"))


async def test_pings_and_stacks_of_a_worker_that_is_well(mortal: RayHandle) -> None:
    calls = [asyncio.create_task(mortal.call("hang")), asyncio.create_task(mortal.call("spin", 4.0))]
    await asyncio.sleep(0.3)
    assert await mortal.ping(2.0)
    stacks = await mortal.stacks(5.0)
    assert "in spin" in stacks and "in hang" in stacks and "MainThread" in stacks
    assert mortal.pid == await mortal.call("pid") and mortal.node
    for call in calls:
        call.cancel()


async def test_stacks_while_the_event_loop_is_blocked(mortal: RayHandle) -> None:
    call = asyncio.create_task(mortal.call("block_the_loop"))
    await asyncio.sleep(0.3)
    assert not await mortal.ping(0.5)
    assert "in block_the_loop" in await mortal.stacks(5.0)
    call.cancel()


async def test_stacks_while_c_code_holds_the_interpreter(mortal: RayHandle) -> None:
    call = asyncio.create_task(mortal.call("hold_the_interpreter"))
    await asyncio.sleep(0.3)
    began = time.monotonic()
    assert not await mortal.ping(0.5)
    stacks = await mortal.stacks(3.0)
    assert time.monotonic() - began < 4.5
    assert stacks.startswith(f"process {mortal.pid} on {mortal.node} does not answer and is sleeping; its threads:\n")
    assert "in hold_the_interpreter" in stacks
    call.cancel()


async def test_a_worker_that_freezes_while_it_is_made_is_ended(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal.cluster.ray.cluster.NEWCOMER_SILENCE_S", 2.0)
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match="frozen did not start: it gave no sign of life for 2 s"):
        await site.cluster.spawn(spec("frozen", "made", factory="cluster_workers:Freezes"))
    assert time.monotonic() - began < 30


async def test_a_worker_that_freezes_while_it_starts_is_given_up(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal.contracts.cluster.NEWCOMER_SILENCE_S", 2.0)
    made = await site.cluster.spawn(spec("freezing", "later", factory="cluster_workers:Freezes"))
    with pytest.raises(WorkerFailed, match="freezing gave no sign of life for 2 s while it started"):
        await start_of(made, 60.0)
    await made.kill()
    await next_death(site)


async def test_a_stopped_worker_is_seen_and_goes_away_for_good(site: Site, mortal: RayHandle) -> None:
    other = await site.cluster.spawn(spec("other", mortal, factory=MORTAL))
    process = psutil.Process(mortal.pid)
    calls = [
        asyncio.create_task(mortal.call("echo_later", 1, 1.0)),
        asyncio.create_task(other.call("ask", mortal, "echo_later", 2, 1.0)),
    ]
    await asyncio.sleep(0.3)
    process.suspend()
    assert not await mortal.ping(0.5)
    seen = f"process {mortal.pid} on {mortal.node} does not answer and is stopped (SIGSTOP)"
    assert await mortal.stacks(2.0) == seen
    began = time.monotonic()
    await mortal.kill()
    assert time.monotonic() - began < 2
    assert not psutil.wait_procs([process], timeout=5)[1]
    for call in calls:
        with pytest.raises(WorkerDied, match="mortal"):
            await asyncio.wait_for(call, 10)
    death = await next_death(site)
    assert (death.name, death.reason) == ("mortal", "it was ended by the controller")
    await other.kill()
    await next_death(site)


async def test_closing_does_not_wait_for_a_stopped_worker(site: Site, mortal: RayHandle) -> None:
    """The last of the module: it ends the cluster."""
    process = psutil.Process(mortal.pid)
    process.suspend()
    began = time.monotonic()
    await site.close()
    assert time.monotonic() - began < 12
    assert not psutil.wait_procs([process], timeout=5)[1]
    mortal.is_gone = True
