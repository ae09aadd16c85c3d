"""The engine's time table: hand-computed times, and any mixture of events against a simulation of every token."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.builtins.sim.batching import Batching, Cost, Slot

COST = Cost(step_s=1.0, step_s_per_request=0.5, prefill_s_per_token=0.25, max_running=2)


def pass_until(batching: Batching, now: float) -> list[tuple[float, Slot]]:
    """Pass all boundaries up to `now`, that moment's included."""
    done: list[tuple[float, Slot]] = []
    while batching.due is not None and batching.due <= now + 1e-9:
        at = batching.due
        done += [(at, slot) for slot in batching.advance()]
    return done


def ends(batching: Batching, until: float = 1e6) -> list[tuple[float, object]]:
    return [(round(at, 9), slot.owner) for at, slot in pass_until(batching, until)]


def test_one_request_takes_its_prefill_and_its_steps() -> None:
    batching = Batching(COST)
    batching.add(Slot(num_prompt=4, limit=3, owner="a"), 10.0)
    assert ends(batching) == [(10.0 + 4 * 0.25 + 3 * 1.5, "a")]
    assert (batching.tokens(99.0), batching.busy_s(99.0), batching.due) == (3, (5.5, 0.0), None)


def test_a_second_request_waits_for_the_step_that_runs_and_its_prefill_stops_the_first() -> None:
    batching = Batching(COST)
    batching.add(Slot(num_prompt=0, limit=3, owner="a"), 0.0)
    assert pass_until(batching, 0.0) == []
    batching.add(Slot(num_prompt=8, limit=1, owner="b"), 0.7)
    # a: one step to 1.5; b's prefill to 3.5; one step together to 5.5 (b is done); a's third to 7.0.
    assert ends(batching) == [(5.5, "b"), (7.0, "a")]
    assert (batching.tokens(99.0), batching.busy_s(99.0)) == (4, (7.0, 0.0))


def test_a_request_beyond_the_limit_waits_and_an_urgent_one_passes_it() -> None:
    batching = Batching(COST)
    for owner, limit in (("a", 2), ("b", 4), ("c", 1)):
        batching.add(Slot(num_prompt=0, limit=limit, owner=owner), 0.0)
    assert pass_until(batching, 0.0) == [] and batching.sizes == (2, 1)
    batching.add(Slot(num_prompt=0, limit=1, owner="urgent"), 1.0, first=True)
    # Two steps of 2 s (a is done), one with the urgent one to 6 (urgent is done), one with c to 8.
    assert ends(batching) == [(4.0, "a"), (6.0, "urgent"), (8.0, "b"), (8.0, "c")]


def test_a_pause_begins_after_the_pass_and_costs_nothing_else() -> None:
    batching = Batching(COST)
    batching.add(Slot(num_prompt=0, limit=2, owner="a"), 0.0)
    assert pass_until(batching, 0.0) == []
    batching.pause(0.1)
    assert not batching.stopped and batching.due == 1.5
    assert pass_until(batching, 1.5) == [] and batching.stopped and batching.due is None
    assert (batching.steps(50.0), batching.busy_s(50.0)) == (1, (1.5, 48.5))
    batching.resume(100.0)
    assert ends(batching) == [(101.5, "a")]
    assert batching.busy_s(200.0) == (3.0, 98.5)


def test_interrupted_requests_have_the_tokens_of_whole_steps() -> None:
    batching = Batching(COST)
    slot = Slot(num_prompt=0, limit=9)
    batching.add(slot, 0.0)
    assert pass_until(batching, 4.0) == []
    assert batching.interrupt(4.0) == [slot] and slot.num_tokens == 2
    assert batching.sizes == (0, 0) and pass_until(batching, 9.0) == []


@dataclass
class Naive:
    """The same engine token by token; `made` has the version of each token."""

    cost: Cost
    events: list[tuple[float, str, int, int]]
    boundaries_first: bool
    """Of one moment: a pass that ends lets a wanted pause begin before what comes at that moment, a resume included."""
    made: dict[int, list[int]] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)

    def run(self) -> None:
        now, version, paused, wanted = 0.0, 0, False, False
        waiting: list[tuple[int, int, int]] = []
        running: list[list[int]] = []
        events = sorted(self.events, key=lambda event: event[0])
        while True:
            at_this_moment = False
            while events and events[0][0] <= now + 1e-9:
                if self.boundaries_first and not at_this_moment and events[0][0] >= now - 1e-9:
                    at_this_moment, paused = True, paused or wanted
                _, what, first, second = events.pop(0)
                if what == "add":
                    waiting.append((len(self.made), first, second))
                    self.made[len(self.made)] = []
                elif what == "pause":
                    wanted = True
                else:
                    wanted = False
            # Weights change at the end of each pause that has begun.
            if paused and not wanted:
                version += 1
            paused = wanted
            if paused or not (running or waiting):
                if not events:
                    return
                now = max(now, events[0][0])
                continue
            prompts = 0
            while waiting and len(running) < self.cost.max_running:
                uid, prompt, limit = waiting.pop(0)
                running.append([uid, limit])
                prompts += prompt
            if prompts:
                now += prompts * self.cost.prefill_s_per_token
                continue
            now += self.cost.step(len(running))
            for entry in running:
                self.made[entry[0]].append(version)
            for uid, limit in running:
                if len(self.made[uid]) == limit:
                    self.ended[uid] = now
            running = [entry for entry in running if len(self.made[entry[0]]) < entry[1]]


MOMENTS = st.one_of(
    st.floats(0, 60, allow_nan=False),
    st.integers(0, 40).map(lambda halves: halves / 2),  # boundaries, where ties are
)
ARRIVALS = st.tuples(MOMENTS, st.just("add"), st.integers(0, 5), st.integers(1, 12))
PAUSES = st.lists(st.tuples(MOMENTS, st.floats(0.25, 9.0)), max_size=4)


@settings(max_examples=300, deadline=None)
@given(
    arrivals=st.lists(ARRIVALS, min_size=1, max_size=14),
    pauses=PAUSES,
    step_s=st.sampled_from([0.5, 1.0, 0.37]),
    per_request=st.sampled_from([0.0, 0.5, 0.013]),
    prefill=st.sampled_from([0.0, 0.25, 0.11]),
    max_running=st.integers(1, 5),
    first=st.sampled_from(["events", "boundaries"]),
)
def test_any_mixture_of_events_is_what_token_by_token_gives(
    arrivals: list[tuple[float, str, int, int]],
    pauses: list[tuple[float, float]],
    step_s: float,
    per_request: float,
    prefill: float,
    max_running: int,
    first: str,
) -> None:
    cost = Cost(step_s=step_s, step_s_per_request=per_request, prefill_s_per_token=prefill, max_running=max_running)
    events = [*arrivals]
    free = 0.0
    for at, length in sorted(pauses):
        if at > free:
            events += [(at, "pause", 0, 0), (at + length, "resume", 0, 0)]
            free = at + length
    naive = Naive(cost, events, first == "boundaries")
    naive.run()
    ended, made = simulate(cost, events, boundaries_first=first == "boundaries")
    assert ended.keys() == naive.ended.keys()
    assert all(ended[uid] == pytest.approx(naive.ended[uid], abs=1e-6) for uid in ended)
    assert made == naive.made


def simulate(
    cost: Cost, events: list[tuple[float, str, int, int]], *, boundaries_first: bool
) -> tuple[dict[int, float], dict[int, list[int]]]:
    """Do the same with `Batching`, with the engine's bookkeeping of versions.

    `boundaries_first`: of one moment; what comes at the instant at which a pass began must still be in time.
    """
    batching, slots, ended = Batching(cost), [], {}
    changes = [(0, 0)]

    def until(moment: float, *, included: bool) -> None:
        limit = moment + 1e-9 if included else moment - 1e-9
        while batching.due is not None and batching.due <= limit:
            at = batching.due
            for slot in batching.advance():
                ended[slot.owner] = at

    for moment, what, first, second in sorted(events, key=lambda event: event[0]):
        until(moment, included=boundaries_first)
        if what == "add":
            slots.append(Slot(num_prompt=first, limit=second, owner=len(slots)))
            batching.add(slots[-1], moment)
        elif what == "pause":
            batching.pause(moment)
        else:
            if batching.stopped:
                changes.append((batching.steps(moment), changes[-1][1] + 1))
            batching.resume(moment)
    until(1e9, included=True)
    made = {}
    for slot in slots:
        steps = range(slot.first, slot.first + slot.limit)
        made[slot.owner] = [max(version for at, version in changes if at <= step) for step in steps]
    return ended, made
