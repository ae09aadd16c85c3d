"""What a resharder with the capability `shards` must do for a trainer of several ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from areal.contracts.component import Component
from areal.contracts.resharder import SHARDS
from areal.contracts.transfer import Layout, Piece, Plan
from areal.errors import TransferFailed
from areal.testing.resharder_processes import (
    DEADLINE_S,
    SHORT_S,
    SLACK_S,
    TENSORS,
    Crew,
    expected,
    expected_checksums,
    pieces,
)

SENDING = (0, 1, 2)
"""The ranks that have pieces."""


class ResharderRanks:
    """Part of `ResharderConformance`. Invariant: every wait here has a deadline."""

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
        """Return a function (engines, dtype, ranks' pieces) -> what a child needs to make its half of a new plan."""
        parsed = component.parse_options(options)
        resharder = component.load()(parsed, str(tmp_path))

        def make(
            num_engines: int, dtype: str = "bfloat16", pieces: tuple[tuple[Piece, ...], ...] = ()
        ) -> tuple[Component, Any, Plan]:
            source = Layout(
                host="one",
                collective=self.collective,
                dtype="float32",
                tensors=TENSORS,
                num_ranks=max(1, len(pieces)),
                pieces=pieces,
            )
            target = Layout(host="one", collective=self.collective, dtype=dtype)
            return component, parsed, resharder.plan(source, [target] * num_engines)

        yield make
        crew.close_halves()

    def lose(self, crew: Crew, name: str, fate: str) -> None:
        """Take a process away while it is in the middle of a transfer."""
        assert crew[name].outcome()[0] == "stalled"
        if fate == "killed":
            crew.kill(name)
        else:
            crew[name].freeze()

    @pytest.fixture
    def sharded(self, component: Component, make: Any) -> Any:
        """Return a function (engines) -> half of a plan whose source is cut as CUTS says."""
        if SHARDS not in component.capabilities:
            pytest.skip(f"the resharder {component.name!r} has not the capability {SHARDS!r}")

        def make_sharded(num_engines: int) -> tuple[Component, Any, Plan]:
            return make(num_engines, pieces=pieces())

        return make_sharded

    def begin(
        self, crew: Crew, half: Any, version: int, deadline_s: float = DEADLINE_S, faults: Mapping[int, str] = {}
    ) -> None:
        """Have all engines receive and all ranks with pieces send; `faults`: by rank."""
        for engine in range(len(half[2].targets)):
            crew[f"engine-{engine}"].ask("receive", half, engine, version, deadline_s, "")
        for rank in SENDING:
            if (fault := faults.get(rank, "")) != "absent":
                crew[f"rank-{rank}"].ask("send", half, version, deadline_s, fault, rank)

    def finish(self, crew: Crew, half: Any, version: int) -> None:
        """Compare what `begin` brought."""
        checksums: dict[str, int] = {}
        for rank in SENDING:
            receipt = crew[f"rank-{rank}"].value()
            assert receipt["version"] == version and receipt["num_bytes"] > 0
            assert not checksums.keys() & receipt["checksums"].keys()
            checksums |= receipt["checksums"]
        assert checksums == expected_checksums(version, "bfloat16", half[2].source)
        for engine in range(len(half[2].targets)):
            assert sorted(crew[f"engine-{engine}"].value()) == sorted(expected(version, "bfloat16"))

    def refused(self, crew: Crew, names: Sequence[str], within_s: float) -> list[str]:
        """Return why each of them raised TransferFailed, in one line."""
        reasons: list[str] = []
        for name in names:
            kind, reason = crew[name].outcome(within_s)
            assert (kind, "\n" in str(reason)) == ("refused", False), f"{name}: {kind}: {reason}"
            reasons.append(reason)
        return reasons

    @pytest.mark.parametrize("num_engines", [1, 2])
    def test_pieces_of_all_ranks_arrive_as_whole_tensors(self, crew: Crew, sharded: Any, num_engines: int) -> None:
        half = sharded(num_engines)
        for version in (1, 2, 3, 4):
            self.begin(crew, half, version)
            self.finish(crew, half, version)

    def test_a_rank_without_pieces_sends_nothing_and_is_not_needed(self, crew: Crew, sharded: Any) -> None:
        half = sharded(1)
        crew["rank-3"].ask("send", half, 1, DEADLINE_S, "", 3)
        assert crew["rank-3"].value() == {"version": 1, "checksums": {}, "num_bytes": 0}
        self.begin(crew, half, 1)
        self.finish(crew, half, 1)

    @pytest.mark.parametrize("broken", SENDING)
    def test_a_rank_whose_source_breaks_ends_the_wait_of_all(self, crew: Crew, sharded: Any, broken: int) -> None:
        half = sharded(2)
        self.begin(crew, half, 1, faults={broken: "raise"})
        others = [f"rank-{rank}" for rank in SENDING if rank != broken]
        (reason,) = self.refused(crew, [f"rank-{broken}"], DEADLINE_S / 2)
        assert "the source broke" in reason
        self.refused(crew, [*others, "engine-0", "engine-1"], DEADLINE_S / 2)
        again = sharded(2)
        self.begin(crew, again, 1)
        self.finish(crew, again, 1)

    @pytest.mark.parametrize("fate", ["killed", "frozen"])
    @pytest.mark.parametrize("lost", [0, 1])
    def test_a_lost_rank_fails_all_others_in_time(self, crew: Crew, sharded: Any, lost: int, fate: str) -> None:
        half = sharded(2)
        self.begin(crew, half, 1)
        self.finish(crew, half, 1)
        self.begin(crew, half, 2, 3 * SHORT_S, faults={lost: "stall"})
        self.lose(crew, f"rank-{lost}", fate)
        others = [f"rank-{rank}" for rank in SENDING if rank != lost]
        reasons = self.refused(crew, others, 3 * SHORT_S + SLACK_S)
        assert f"rank {lost}" in reasons[0], reasons
        for reason in self.refused(crew, ["engine-0", "engine-1"], 3 * SHORT_S + SLACK_S):
            assert "sender" in reason or f"rank {lost}" in reason, reason
        crew.kill(f"rank-{lost}")
        again = sharded(2)
        self.begin(crew, again, 2)
        self.finish(crew, again, 2)

    def test_an_absent_rank_is_named_in_time(self, crew: Crew, sharded: Any) -> None:
        half = sharded(1)
        self.begin(crew, half, 1, SHORT_S, faults={2: "absent"})
        reasons = self.refused(crew, ["rank-0", "rank-1"], SHORT_S + SLACK_S)
        assert "rank 2" in reasons[0], reasons
        self.refused(crew, ["engine-0"], SHORT_S + SLACK_S)

    def test_boxes_that_leave_a_gap_or_meet_are_refused(self, sharded: Any, make: Any) -> None:
        first, *others = pieces()
        shorter = Piece(tensor=0, start=(0, 0), shape=(199, 1024))
        longer = Piece(tensor=0, start=(0, 0), shape=(201, 1024))
        moved = Piece(tensor=0, start=(1, 0), shape=(200, 1024))
        for wrong in (shorter, longer, moved):
            with pytest.raises(TransferFailed, match=r"layers\.0\.weight"):
                make(1, pieces=((wrong, *first[1:]), *others))
