"""The conformance kit of resharders: real processes, real kills.

class TestMine(ResharderConformance):
    @pytest.fixture
    def component(self) -> Component:
        return Component(name="mine", factory="my_package.mine:Mine")

With the capability `shards` the component is also held to what a trainer of several ranks needs.
"""

from __future__ import annotations

from typing import Any

import pytest

from areal.errors import TransferFailed
from areal.testing.resharder_processes import (
    DEADLINE_S,
    SHORT_S,
    SLACK_S,
    Crew,
    expected,
    expected_checksums,
)
from areal.testing.resharder_ranks import ResharderRanks


class ResharderConformance(ResharderRanks):
    """Subclass it, give `component`, and `options` when there are any. Invariant: every wait here has a deadline."""

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
        assert receipt["checksums"] == expected_checksums(version, dtype, half[2].source)
        assert receipt["num_bytes"] > 0

    @pytest.mark.parametrize("num_engines", [1, 2])
    def test_every_tensor_arrives_exactly_once(self, crew: Crew, make: Any, num_engines: int) -> None:
        self.publish(crew, make(num_engines), version=1)

    def test_versions_follow_each_other(self, crew: Crew, make: Any) -> None:
        half = make(2)
        for version in (1, 2, 3, 4):
            self.publish(crew, half, version)

    def test_what_is_said_to_last_outlives_its_sender(self, crew: Crew, make: Any) -> None:
        half = make(1)
        crew["engine-0"].ask("keep", half, 0, 1, DEADLINE_S)
        crew["sender"].ask("send", half, 1, DEADLINE_S, "")
        assert crew["sender"].value()["version"] == 1
        if not crew["engine-0"].value():
            pytest.skip("the receiver does not say that what it yields lasts")
        for version in (2, 3, 4):
            self.publish(crew, half, version)
        crew["engine-0"].ask("close")
        crew["engine-0"].value()
        crew.kill("sender")
        self.publish(crew, make(1), version=5)
        crew["engine-0"].ask("kept")
        assert crew["engine-0"].value() == expected(1, "bfloat16")

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
