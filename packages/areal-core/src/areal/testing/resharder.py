"""The conformance kit of resharders: real processes, real kills.

class TestMine(ResharderConformance):
    @pytest.fixture
    def component(self) -> Component:
        return Component(name="mine", factory="my_package.mine:Mine")
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Iterator
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import pytest

from areal.contracts.component import Component
from areal.contracts.transfer import Layout, Plan, TensorSpec, checksum
from areal.errors import TransferFailed

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from torch import Tensor

# Long enough for a loaded machine; no passing case waits for it.
DEADLINE_S = 60.0
# For the cases in which somebody is missing: they last this long.
SHORT_S = 1.5
# What a process may add to its deadline before it counts as hanging.
SLACK_S = 20.0
# Awkward on purpose: a scalar, an empty tensor, a transposed one, integers, and enough bytes for several sends.
TENSORS = (
    *(TensorSpec(name=f"layers.{i}.weight", shape=(512, 1024), dtype="float32") for i in range(6)),
    TensorSpec(name="scale", shape=(), dtype="float32"),
    TensorSpec(name="empty", shape=(0, 8), dtype="float32"),
    TensorSpec(name="transposed", shape=(33, 65), dtype="float32"),
    TensorSpec(name="half", shape=(7, 5), dtype="bfloat16"),
    TensorSpec(name="steps", shape=(3,), dtype="int64"),
    TensorSpec(name="norm.weight", shape=(129,), dtype="float32"),
)
Arrival = tuple[str, tuple[int, ...], str, int]
"""Name, shape, dtype and checksum of one tensor."""


def weights(seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield TENSORS with values that depend on `seed` only."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for spec in TENSORS:
        values = torch.randn(prod(spec.shape), generator=generator) * 100
        if spec.name == "transposed":
            yield spec.name, values.reshape(spec.shape[::-1]).T
        else:
            yield spec.name, values.reshape(spec.shape).to(getattr(torch, spec.dtype))


@cache
def expected(seed: int, dtype: str) -> list[Arrival]:
    """Return what a receiver of `dtype` must see."""
    import torch

    arrivals: list[Arrival] = []
    for name, tensor in weights(seed):
        cast = tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
        arrivals.append(describe(name, cast))
    return arrivals


def describe(name: str, tensor: Tensor) -> Arrival:
    return name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), checksum(tensor)


class Halves:
    """Lives in a child process. Invariant: one half per plan and role, kept as a worker would keep it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._held: dict[tuple[str, int], Any] = {}

    def send(self, half: tuple[Component, Any, Plan], version: int, deadline_s: float, fault: str) -> dict[str, Any]:
        receipt = self._half(half, -1).send(version, self._stream(version, fault), deadline_s)
        return {"version": receipt.version, "checksums": dict(receipt.checksums), "num_bytes": receipt.num_bytes}

    def receive(
        self, half: tuple[Component, Any, Plan], member: int, version: int, deadline_s: float, fault: str
    ) -> list[Arrival]:
        arrivals: list[Arrival] = []
        for name, tensor in self._half(half, member).receive(version, deadline_s):
            arrivals.append(describe(name, tensor))
            if fault == "stall":
                self._stall()
        return arrivals

    def close(self) -> None:
        """Close every half twice: the second time must be harmless."""
        for half in [*self._held.values()] * 2:
            half.close()
        self._held.clear()

    def _half(self, half: tuple[Component, Any, Plan], member: int) -> Any:
        component, options, plan = half
        if (plan.uid, member) not in self._held:
            resharder = component.load()(options, "")
            made = resharder.sender(plan) if member < 0 else resharder.receiver(plan, member)
            self._held[plan.uid, member] = made
        return self._held[plan.uid, member]

    def _stream(self, version: int, fault: str) -> Iterator[tuple[str, Tensor]]:
        for index, item in enumerate(weights(version)):
            if index == 2 and fault == "stall":
                self._stall()
            if index == 2 and fault == "raise":
                raise RuntimeError("the source broke")
            yield item

    def _stall(self) -> None:
        self._connection.send(("stalled", None))
        time.sleep(10 * DEADLINE_S)


def serve(connection: Connection) -> None:
    """Do what the parent asks until it hangs up; the body of a child process."""
    halves = Halves(connection)
    while True:
        try:
            method, args = connection.recv()
        except EOFError:
            return
        try:
            answer = ("returned", getattr(halves, method)(*args))
        except TransferFailed as error:
            answer = ("refused", str(error))
        except BaseException:
            answer = ("crashed", traceback.format_exc())
        connection.send(answer)


class Member:
    """One child process as the test sees it. Invariant: `outcome` ends within its deadline."""

    def __init__(self, start_method: str) -> None:
        context: Any = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            context.set_forkserver_preload(["torch", "areal.testing.resharder"])
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, method: str, *args: Any) -> None:
        self._connection.send((method, args))

    def outcome(self, within_s: float = DEADLINE_S + SLACK_S) -> tuple[str, Any]:
        """Return ``(returned | refused | stalled | crashed | died, value)``; fails the test when it hangs."""
        if not self._connection.poll(within_s):
            self.kill()
            pytest.fail(f"a half neither returned nor raised within {within_s:g} s")
        try:
            return self._connection.recv()
        except EOFError:
            return "died", self._process.exitcode

    def value(self, within_s: float = DEADLINE_S + SLACK_S) -> Any:
        """Return what the call returned; fails the test when it did anything else."""
        kind, value = self.outcome(within_s)
        assert kind == "returned", f"{kind}: {value}"
        return value

    def freeze(self) -> None:
        """SIGSTOP: the process stays, and does nothing any more."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """SIGKILL, as a node's failure would be."""
        self._process.kill()
        self._process.join()


class Crew:
    """The processes of a test class. Invariant: a killed one is replaced, so that no case sees another's damage."""

    def __init__(self, start_method: str) -> None:
        self._start_method = start_method
        self._members: dict[str, Member] = {}

    def __getitem__(self, name: str) -> Member:
        if name not in self._members:
            self._members[name] = Member(self._start_method)
        return self._members[name]

    def kill(self, name: str) -> None:
        if member := self._members.pop(name, None):
            member.kill()

    def close_halves(self) -> None:
        for member in self._members.values():
            member.ask("close")
            member.value()

    def close(self) -> None:
        for name in list(self._members):
            self.kill(name)


class ResharderConformance:
    """Subclass it, give `component`, and `options` when there are any. Invariant: every wait here has a deadline."""

    start_method = "forkserver"
    """Of the child processes; ``spawn`` for a device library that cannot be forked after its import."""
    collective = "gloo"
    """What both sides' layouts offer."""

    @pytest.fixture
    def component(self) -> Component:
        raise NotImplementedError("give the resharder's Component in a fixture named 'component'")

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        """The options as a recipe's table."""
        return {}

    @pytest.fixture(scope="class")
    def crew(self) -> Iterator[Crew]:
        crew = Crew(self.start_method)
        yield crew
        crew.close()

    @pytest.fixture
    def make(self, component: Component, options: dict[str, Any], tmp_path: Any, crew: Crew) -> Iterator[Any]:
        """Return a function (engines, dtype) -> what a child needs to make its half of a new plan."""
        parsed = component.parse_options(options)
        resharder = component.load()(parsed, str(tmp_path))

        def make(num_engines: int, dtype: str = "bfloat16") -> tuple[Component, Any, Plan]:
            source = Layout(host="one", collective=self.collective, dtype="float32", tensors=TENSORS)
            target = Layout(host="one", collective=self.collective, dtype=dtype)
            return component, parsed, resharder.plan(source, [target] * num_engines)

        yield make
        crew.close_halves()

    def publish(self, crew: Crew, half: Any, version: int, dtype: str = "bfloat16") -> None:
        """Send one version to all engines of a plan and compare everything."""
        engines = range(len(half[2].targets))
        for engine in engines:
            crew[f"engine-{engine}"].ask("receive", half, engine, version, DEADLINE_S, "")
        crew["sender"].ask("send", half, version, DEADLINE_S, "")
        receipt = crew["sender"].value()
        wanted = expected(version, dtype)
        for engine in engines:
            assert crew[f"engine-{engine}"].value() == wanted
        assert receipt["version"] == version
        assert receipt["checksums"] == {name: crc for name, _, _, crc in wanted}
        assert receipt["num_bytes"] > 0

    @pytest.mark.parametrize("num_engines", [1, 2])
    def test_every_tensor_arrives_exactly_once(self, crew: Crew, make: Any, num_engines: int) -> None:
        self.publish(crew, make(num_engines), version=1)

    def test_versions_follow_each_other(self, crew: Crew, make: Any) -> None:
        half = make(2)
        for version in (1, 2, 3, 4):
            self.publish(crew, half, version)

    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    def test_the_sender_casts_to_the_engines_dtype(self, crew: Crew, make: Any, dtype: str) -> None:
        self.publish(crew, make(1, dtype), version=1, dtype=dtype)

    def test_a_source_that_breaks_ends_the_wait_of_all(self, crew: Crew, make: Any) -> None:
        half = make(2)
        for engine in (0, 1):
            crew[f"engine-{engine}"].ask("receive", half, engine, 1, DEADLINE_S, "")
        crew["sender"].ask("send", half, 1, DEADLINE_S, "raise")
        kind, reason = crew["sender"].outcome()
        assert kind == "refused" and "the source broke" in reason
        for engine in (0, 1):
            kind, reason = crew[f"engine-{engine}"].outcome(DEADLINE_S / 2)
            assert (kind, "\n" in reason) == ("refused", False), reason
        self.publish(crew, make(2), version=1)

    @pytest.mark.parametrize("fate", ["killed", "frozen"])
    def test_a_lost_sender_fails_the_engines_in_time(self, crew: Crew, make: Any, fate: str) -> None:
        half = make(2)
        self.publish(crew, half, version=1)
        for engine in (0, 1):
            crew[f"engine-{engine}"].ask("receive", half, engine, 2, 2 * SHORT_S, "")
        crew["sender"].ask("send", half, 2, DEADLINE_S, "stall")
        self.lose(crew, "sender", fate)
        for engine in (0, 1):
            kind, reason = crew[f"engine-{engine}"].outcome(2 * SHORT_S + SLACK_S)
            assert (kind, "\n" in reason) == ("refused", False), reason
            assert "sender" in reason
        crew.kill("sender")
        self.publish(crew, make(2), version=2)

    @pytest.mark.parametrize("fate", ["killed", "frozen"])
    def test_a_lost_engine_stops_nobody_for_long(self, crew: Crew, make: Any, fate: str) -> None:
        half = make(2)
        self.publish(crew, half, version=1)
        crew["engine-0"].ask("receive", half, 0, 2, 2 * SHORT_S, "")
        crew["engine-1"].ask("receive", half, 1, 2, DEADLINE_S, "stall")
        crew["sender"].ask("send", half, 2, 2 * SHORT_S, "")
        self.lose(crew, "engine-1", fate)
        kind, value = crew["sender"].outcome(2 * SHORT_S + SLACK_S)
        assert kind == "returned" or (kind == "refused" and "engine 1" in value), value
        kind, value = crew["engine-0"].outcome(2 * SHORT_S + SLACK_S)
        assert kind == "refused" or (kind == "returned" and value == expected(2, "bfloat16")), value
        crew.kill("engine-1")
        self.publish(crew, make(1), version=2)

    def lose(self, crew: Crew, name: str, fate: str) -> None:
        """Take a process away while it is in the middle of a transfer."""
        assert crew[name].outcome()[0] == "stalled"
        if fate == "killed":
            crew.kill(name)
        else:
            crew[name].freeze()

    def test_another_version_than_the_sent_one_is_refused(self, crew: Crew, make: Any) -> None:
        half = make(1)
        crew["engine-0"].ask("receive", half, 0, 2, SHORT_S, "")
        crew["sender"].ask("send", half, 1, SHORT_S, "")
        kind, reason = crew["engine-0"].outcome(SHORT_S + SLACK_S)
        assert kind == "refused" and "version 2" in reason, reason
        assert crew["sender"].outcome(SHORT_S + SLACK_S)[0] in ("returned", "refused")

    def test_an_absent_sender_is_named_in_time(self, crew: Crew, make: Any) -> None:
        crew["engine-0"].ask("receive", make(1), 0, 1, SHORT_S, "")
        kind, reason = crew["engine-0"].outcome(SHORT_S + SLACK_S)
        assert kind == "refused" and "sender" in reason, reason

    def test_a_plan_without_engines_is_refused(self, make: Any) -> None:
        with pytest.raises(TransferFailed):
            make(0)
