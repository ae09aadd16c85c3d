"""Both clusters keep one law for their handles; Ray's workers are real processes that are really killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from ray_site import Site, spec

from areal.cluster.inline import InlineCluster
from areal.cluster.ray import RayCluster, RayHandle
from areal.contracts.cluster import Cluster, Handle
from areal.contracts.options import Options
from areal.errors import ConfigError, WorkerDied, WorkerFailed

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_CALLS = 2000


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await condition():  # noqa: ASYNC110 -- nothing announces what tests look for
            await asyncio.sleep(0.01)


async def times(worker: Handle, entry: str) -> int:
    """Return how often the worker's log names an entry."""
    return (await worker.call("get_log")).count(entry)


class Shared:
    """What flow may rely on, whatever carries the workers."""

    async def test_calls(self, worker: Handle) -> None:
        assert await worker.call("echo", {"a": (1, 2.5, None)}) == {"a": (1, 2.5, None)}
        assert await worker.call("echo_later", "late", deadline_s=30.0) == "late"
        assert await worker.call("append", 1) is None

    async def test_many_calls_at_once(self, worker: Handle) -> None:
        values = await asyncio.gather(*(worker.call("echo_later", number) for number in range(NUM_CALLS)))
        assert values == list(range(NUM_CALLS))

    async def test_sync_methods_run_one_after_the_other(self, worker: Handle) -> None:
        before = len(await worker.call("get_log"))
        await asyncio.gather(*(worker.call("append", number) for number in range(50)))
        assert (await worker.call("get_log"))[before:] == list(range(50))

    async def test_streams(self, worker: Handle) -> None:
        assert [item async for item in worker.stream("count", 100)] == list(range(100))
        assert [item async for item in worker.stream("count", 0)] == []
        failing = worker.stream("count", 5, 2)
        assert [await anext(failing), await anext(failing)] == [0, 1]
        with pytest.raises(WorkerFailed, match="failed in 'count': ValueError: no 2"):
            await anext(failing)

    async def test_an_abandoned_stream_ends_in_the_worker(self, worker: Handle) -> None:
        before = await times(worker, "hangs no more")
        async with aclosing(worker.stream("hang_after", 7)) as stream:  # type: ignore[type-var]
            assert await anext(stream) == 7
            waiting = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.05)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await self.ended(worker, before)

    async def ended(self, worker: Handle, before: int) -> None:
        async def once_more() -> bool:
            return await times(worker, "hangs no more") > before

        await until(once_more)

    async def hangs(self, worker: Handle, wanted: int) -> None:
        async def enough() -> bool:
            return await times(worker, "hangs") >= wanted

        await until(enough)

    @pytest.mark.parametrize(
        ("kind", "error", "said"),
        [
            ("areal", ConfigError, r"^no such thing; did you mean 'that'\?$"),
            ("died", WorkerDied, "^somebody else died$"),
            ("value", WorkerFailed, "failed in 'fail': ValueError: a bad value$"),
            ("timeout", WorkerFailed, "failed in 'fail': TimeoutError: my own clock$"),
        ],
    )
    async def test_errors(self, worker: Handle, kind: str, error: type[Exception], said: str) -> None:
        with pytest.raises(error, match=said) as caught:
            await worker.call("fail", kind)
        assert type(caught.value) is error
        assert await worker.call("echo", 1) == 1, "the worker goes on"

    async def test_a_method_that_is_not_there(self, worker: Handle) -> None:
        with pytest.raises(WorkerFailed, match=f"{worker.name} failed in 'nothing': AttributeError"):
            await worker.call("nothing")

    async def test_a_deadline_names_the_worker_and_the_method(self, worker: Handle) -> None:
        before = await times(worker, "hangs no more")
        with pytest.raises(WorkerFailed, match=rf"^{worker.name} did not answer 'hang' within 0\.5 s$") as caught:
            await worker.call("hang", deadline_s=0.5)
        assert not isinstance(caught.value, WorkerDied)
        await self.ended(worker, before)

    async def test_a_cancelled_call_is_cancelled_in_the_worker(self, worker: Handle) -> None:
        begun, before = await times(worker, "hangs"), await times(worker, "hangs no more")
        task = asyncio.create_task(worker.call("hang"))
        await self.hangs(worker, begun + 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await self.ended(worker, before)

    async def test_a_handle_works_in_another_worker_and_a_killed_one_ends_its_calls(
        self, cluster: Cluster, worker: Handle
    ) -> None:
        other = await cluster.spawn(spec("other", worker, environment={"AREAL_TEST_OTHER": "set"}))
        assert await other.call("environment", "AREAL_TEST_OTHER") == "set"
        assert await other.call("ask", worker, "echo", 5) == 5
        (passed,) = await other.call("get_args") if isinstance(cluster, InlineCluster) else [worker]
        assert passed is worker
        with pytest.raises(ConfigError, match="no such thing"):
            await other.call("ask", worker, "fail", "areal")
        assert await worker.call("ask", other, "echo_later", "there") == "there"

        open_call = asyncio.create_task(other.call("hang"))
        stream = other.stream("hang_after", 1)
        assert await anext(stream) == 1
        open_stream = asyncio.ensure_future(anext(stream))
        elsewhere = asyncio.create_task(worker.call("ask", other, "hang"))
        await self.hangs(other, 3)
        await other.kill()
        for task in (open_call, open_stream, elsewhere):
            with pytest.raises(WorkerDied, match="other"):
                await asyncio.wait_for(task, 30)
        for asker in (lambda: other.call("echo", 1), lambda: anext(other.stream("count", 1))):
            with pytest.raises(WorkerDied, match="other"):
                await asker()
        await other.kill()  # harmless

        deaths = cluster.watch()
        death = await asyncio.wait_for(anext(deaths), 30)
        assert death.name == "other" and death.reason
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(deaths), 0.2)  # reported once

    @pytest.mark.parametrize(
        ("told", "said"),
        [("the chip is on fire", "the chip is on fire"), ("", "it failed in 'ended': ValueError: a bad w")],
    )
    async def test_a_worker_that_ends_by_itself(self, cluster: Cluster, worker: Handle, told: str, said: str) -> None:
        ending = await cluster.spawn(spec("ending", factory="cluster_workers:Ending"))
        assert await ending.call("echo", 1) == 1
        open_call = asyncio.create_task(ending.call("hang"))
        elsewhere = asyncio.create_task(worker.call("ask", ending, "hang"))
        await self.hangs(ending, 2)
        with pytest.raises(WorkerDied, match=f"ending (died|was ended while).*: {said}"):
            await asyncio.wait_for(ending.call("break_down", told), 30)
        with pytest.raises(WorkerDied, match=said):
            await asyncio.wait_for(open_call, 30)
        with pytest.raises(WorkerDied, match="ending"):
            await asyncio.wait_for(elsewhere, 30)
        with pytest.raises(WorkerDied, match=said):
            await ending.call("echo", 1)
        deaths = cluster.watch()
        death = await asyncio.wait_for(anext(deaths), 30)
        assert death.name == "ending" and death.reason.startswith(said)
        await ending.kill()  # as the fleet does
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(deaths), 0.2)  # reported once

    async def test_it_says_where_it_is_and_what_it_does(self, worker: Handle) -> None:
        assert worker.pid == await worker.call("pid") and worker.node
        hanging = asyncio.create_task(worker.call("hang"))
        await asyncio.sleep(0.2)
        assert await worker.ping(10.0)
        assert "in hang" in await worker.stacks(10.0)
        hanging.cancel()

    async def test_workers_that_do_not_start(self, cluster: Cluster) -> None:
        said = {
            "cluster_workers:refuses": "new did not start: environment 'x' needs data",
            "cluster_workers:breaks": "new did not start: ValueError: a bad value",
            "no_such_module:X": "new did not start: cannot import 'no_such_module' for 'no_such_module:X': "
            "No module named 'no_such_module'",
        }
        spawning = (cluster.spawn(spec("new", 1, factory=factory)) for factory in said)
        errors = await asyncio.gather(*spawning, return_exceptions=True)
        assert [type(error) for error in errors] == [WorkerFailed] * 3
        assert [str(error) for error in errors] == list(said.values())


class TestInline(Shared):
    @pytest_asyncio.fixture(loop_scope="module")
    async def cluster(self) -> AsyncIterator[InlineCluster]:
        made = InlineCluster(Options(), "")
        await made.start()
        yield made
        await made.close()

    @pytest_asyncio.fixture(loop_scope="module")
    async def worker(self, cluster: InlineCluster) -> Handle:
        return await cluster.spawn(spec("first"))

    async def test_it_is_this_process(self, worker: Handle) -> None:
        assert await worker.call("pid") == os.getpid()
        thing = object()
        assert await worker.call("echo", thing) is thing

    async def test_closing_closes_workers_in_reverse_order(self) -> None:
        cluster, closed = InlineCluster(Options(), ""), []

        class Closing:
            def __init__(self, name: str) -> None:
                self.name = name

            async def close(self) -> None:
                closed.append(self.name)

        globals()["Closing"] = Closing
        for name in ("first", "second"):
            await cluster.spawn(spec(name, name, factory=f"{__name__}:Closing"))
        await cluster.close()
        await cluster.close()
        assert closed == ["second", "first"]

    async def test_closing_forgets_those_who_could_have_ended(self) -> None:
        before = asyncio.all_tasks()
        cluster = InlineCluster(Options(), "")
        await cluster.spawn(spec("ending", factory="cluster_workers:Ending"))
        assert len(asyncio.all_tasks() - before) == 1
        await cluster.close()
        assert not asyncio.all_tasks() - before

    async def test_another_interpreter_is_refused(self, cluster: InlineCluster) -> None:
        with pytest.raises(WorkerFailed, match="x did not start: it is to run in /other/python, and the cluster 'inl"):
            await cluster.spawn(spec("x", python="/other/python"))


class TestRay(Shared):
    @pytest.fixture
    def cluster(self, site: Site) -> RayCluster:
        return site.cluster

    @pytest_asyncio.fixture(scope="class", loop_scope="module")
    async def worker(self, site: Site) -> Handle:
        made = await site.cluster.spawn(spec("first", resources={"train": 1.0, "CPU": 0.5}))
        site.pids.append(await made.call("pid"))
        return made

    async def test_workers_are_processes_of_their_own(self, worker: Handle) -> None:
        assert await worker.call("pid") != os.getpid()

    async def test_what_cannot_travel_fails_its_own_call(self, worker: Handle) -> None:
        good = [asyncio.create_task(worker.call("echo", number)) for number in range(3)]
        with pytest.raises(WorkerFailed, match="first failed in 'lock': TypeError: cannot pickle"):
            await worker.call("lock")
        with pytest.raises(WorkerFailed, match="first cannot be sent the arguments of 'echo': cannot pickle"):
            await worker.call("echo", threading.Lock())
        with pytest.raises(WorkerFailed, match="first failed in 'fail': AwkwardError: stuck at the door"):
            await worker.call("fail", "awkward")
        with pytest.raises(WorkerFailed, match="first failed in 'fail': SystemExit: 3"):
            await worker.call("fail", "exit")
        assert await asyncio.gather(*good) == [0, 1, 2]

    async def test_the_log_holds_what_the_worker_said(self, site: Site, worker: Handle) -> None:
        await worker.call("say", "quack")
        with pytest.raises(WorkerFailed):
            await worker.call("fail", "value")
        log = site.log("first")
        assert all(line in log for line in ("quack\n", "quack as an error\n", "quack from C\n"))
        assert "ValueError: a bad value" in log and "Traceback" in log

    async def test_kill_9_is_noticed_and_explained(self, site: Site, worker: Handle) -> None:
        victim = await site.cluster.spawn(spec("victim"))
        await victim.call("say", "my last words")
        pid = await victim.call("pid")
        open_call = asyncio.create_task(victim.call("hang"))
        elsewhere = asyncio.create_task(worker.call("ask", victim, "hang"))
        await self.hangs(victim, 2)
        os.kill(pid, signal.SIGKILL)
        death = await asyncio.wait_for(anext(site.cluster.watch()), 60)
        assert death.name == "victim"
        assert (
            death.reason.startswith("killed from outside (SIGKILL)")
            and "its log ends with:" in death.reason
            and "my last words from C" in death.reason
        )
        for task in (open_call, elsewhere):
            with pytest.raises(WorkerDied, match=r"(?s)victim died: .*my last words"):
                await asyncio.wait_for(task, 60)
        with pytest.raises(WorkerDied):
            await victim.call("echo", 1)
        with pytest.raises(WorkerDied):
            await worker.call("ask", victim, "echo", 1)

    async def test_the_process_of_one_that_ended_by_itself_ends(self, site: Site) -> None:
        ending = await site.cluster.spawn(spec("ending", factory="cluster_workers:Ending"))
        process = psutil.Process(await ending.call("pid"))
        await ending.call("say", "my last words")
        with pytest.raises(WorkerDied, match=r"(?s)ending died: enough; its log ends with:.*my last words"):
            await ending.call("break_down", "enough")
        assert (await asyncio.wait_for(anext(site.cluster.watch()), 30)).name == "ending"
        assert not psutil.wait_procs([process], timeout=30)[1]

    async def test_another_interpreter(self, site: Site, worker: Handle, other_python: Path) -> None:
        there = await site.cluster.spawn(spec("there", worker, python=str(other_python)))
        assert await there.call("interpreter") == (str(other_python), str(other_python.parents[1]))
        assert await worker.call("interpreter") == (sys.executable, sys.prefix)
        assert await there.call("ask", worker, "echo", 5) == 5 and await worker.call("ask", there, "echo", 6) == 6
        await there.kill()
        assert (await asyncio.wait_for(anext(site.cluster.watch()), 30)).name == "there"

    async def test_what_the_cluster_does_not_have_is_refused_at_once(self, site: Site) -> None:
        async with asyncio.timeout(10):
            with pytest.raises(WorkerFailed, match=r"x needs 2 'NPU' on one node, .* has 0 'NPU' \(0 fr"):
                await site.cluster.spawn(spec("x", resources={"NPU": 2.0}))
            with pytest.raises(WorkerFailed, match=r"needs 2000 'infer' on one node, .* has 1024"):
                await site.cluster.spawn(spec("x", resources={"infer": 2000.0}))

    async def test_arguments_that_do_not_travel(self, site: Site) -> None:
        with pytest.raises(WorkerFailed, match=r"^x did not start, its arguments cannot be sent: "):
            await site.cluster.spawn(spec("x", threading.Lock()))

    async def test_mailboxes_are_never_shared(self, worker: Handle) -> None:
        assert isinstance(worker, RayHandle)
        make, arguments = worker.__reduce__()
        callers = {make(*arguments)._caller for _ in range(50)}  # each made where the last one was
        assert len(callers) == 50

    async def test_closing_leaves_no_process(self, site: Site, worker: Handle) -> None:
        """The last of the module: it ends the cluster."""
        workers = [worker, await site.cluster.spawn(spec("late"))]
        pids = [await each.call("pid") for each in workers]
        open_call = asyncio.create_task(workers[1].call("hang"))
        await asyncio.sleep(0.05)
        processes = [psutil.Process(pid) for pid in pids]
        # Other tests' helpers (multiprocessing's servers) are children too, and stay.
        children = psutil.Process().children(recursive=True)
        carriers = [child for child in children if "multiprocessing" not in " ".join(child.cmdline())]
        assert carriers
        await site.close()
        with pytest.raises(WorkerDied, match="late was ended by the controller"):
            await asyncio.wait_for(open_call, 10)
        _, alive = psutil.wait_procs([*processes, *carriers], timeout=30)
        assert not alive
        assert "closed from C\n" in site.log("first") and "closed from C\n" in site.log("late")
