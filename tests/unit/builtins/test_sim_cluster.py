"""The simulated cluster: calls take what they charge, deaths come as elsewhere, what computes is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from sim_workers import CLOSED, COMPUTES

from areal.builtins.sim.cluster import SimCluster, SimClusterOptions
from areal.contracts.cluster import Cluster, MakesLoop, WorkerDeath, WorkerSpec
from areal.errors import WorkerDied, WorkerFailed

T = TypeVar("T")


def run(cluster: SimCluster, work: Coroutine[Any, Any, T]) -> T:
    async def whole() -> T:
        await cluster.start()
        try:
            return await work
        finally:
            await cluster.close()

    with asyncio.Runner(loop_factory=cluster.new_event_loop) as runner:
        return runner.run(whole())


def make(**options: Any) -> SimCluster:
    return SimCluster(SimClusterOptions(**options), "")


def spec(name: str, kind: str = "rollout", *args: Any) -> WorkerSpec:
    return WorkerSpec(name=name, kind=kind, factory="sim_workers:Charging", args=args)


def now() -> float:
    return asyncio.get_running_loop().time()


def test_it_is_a_cluster_that_makes_its_loop() -> None:
    cluster = make()
    assert isinstance(cluster, Cluster) and isinstance(cluster, MakesLoop)


def test_sync_calls_take_what_they_charge_one_after_the_other_while_others_go_on() -> None:
    cluster = make(start_s=4.0)

    async def work() -> dict[str, float]:
        busy, free = await cluster.spawn(spec("a")), await cluster.spawn(spec("b"))
        assert now() == 8.0, "two workers, 4 s each"
        ended: dict[str, float] = {}

        async def ask(name: str, call: Coroutine[Any, Any, Any]) -> None:
            await call
            ended[name] = now() - 8.0

        await asyncio.gather(
            ask("first", busy.call("compute", 10.0)),
            ask("second", busy.call("compute", 5.0)),
            ask("async, same worker", busy.call("wait", 2.0)),
            ask("other worker", free.call("compute", 1.0)),
        )
        assert [at - 8.0 for _, at in await busy.call("get_log")] == [0.0, 10.0]
        return ended

    assert run(cluster, work()) == {"first": 10.0, "second": 15.0, "async, same worker": 2.0, "other worker": 1.0}


def test_deadlines_and_failures_are_those_of_other_clusters() -> None:
    cluster = make()

    async def work() -> None:
        worker = await cluster.spawn(spec("a"))
        with pytest.raises(WorkerFailed, match="did not answer 'compute' within 3 s"):
            await worker.call("compute", 10.0, deadline_s=3.0)
        assert now() == 3.0
        with pytest.raises(WorkerFailed, match="failed in 'fail': ValueError: no"):
            await worker.call("fail")
        assert [number async for number in worker.stream("count", 3)] == [0, 1, 2]
        assert now() == 6.0

    run(cluster, work())


def test_a_killed_worker_is_a_dead_one() -> None:
    cluster = make()

    async def work() -> None:
        worker = await cluster.spawn(spec("a"))
        open_call = asyncio.ensure_future(worker.call("compute", 50.0))
        await asyncio.sleep(1.0)
        await worker.kill()
        with pytest.raises(WorkerDied, match="'compute': it was ended by the controller"):
            await open_call
        assert now() == 1.0

    CLOSED.clear()
    run(cluster, work())
    assert len(CLOSED) == 1


def deaths(seed: int, num_engines: int, until_s: float) -> list[tuple[str, float]]:
    """Return who died when."""
    cluster = make(engine_deaths_per_hour=0.5, seed=seed)
    noticed: list[tuple[str, float]] = []

    async def work() -> None:
        handles = [await cluster.spawn(spec(f"engine-{number}", "engine")) for number in range(num_engines)]
        calls = [asyncio.ensure_future(handle.call("wait", 1e9)) for handle in handles]

        async def watch() -> None:
            async for death in cluster.watch():
                assert isinstance(death, WorkerDeath) and "simulated death" in death.reason
                noticed.append((death.name, now()))
                await asyncio.sleep(0)
                with pytest.raises(WorkerDied, match=f"{death.name} was ended while it was asked for 'wait'"):
                    await calls[int(death.name.partition("-")[2])]

        watching = asyncio.ensure_future(watch())
        await asyncio.sleep(until_s)
        watching.cancel()
        for call in calls:
            call.cancel()
        await asyncio.gather(watching, *calls, return_exceptions=True)
        assert not [call for call in calls if call.done() and not call.cancelled() and call.exception() is None]

    CLOSED.clear()
    run(cluster, work())
    assert len(CLOSED) == num_engines - len(noticed), "a process that died is not asked to close"
    return noticed


def test_deaths_are_as_many_as_asked_for_and_the_same_for_the_same_seed() -> None:
    found = deaths(1, 400, 3600.0)
    # 1 - exp(-0.5) of 400 are 157, with a standard deviation of 10.
    assert 117 < len(found) < 197
    assert found == deaths(1, 400, 3600.0) != deaths(2, 400, 3600.0)
    assert [at for _, at in found] == sorted(at for _, at in found)


@pytest.mark.parametrize(
    ("kind", "said"), [("engine", "engine 'real' computes"), ("trainer", "backend 'real' computes")]
)
def test_what_computes_is_refused(kind: str, said: str) -> None:
    cluster = make()

    async def work() -> None:
        await cluster.spawn(spec(f"{kind}-0", kind, COMPUTES))

    with pytest.raises(WorkerFailed, match=said) as caught:
        run(cluster, work())
    assert "\n" not in str(caught.value) and "use" in str(caught.value)
