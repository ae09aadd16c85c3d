"""Trackers never stop a run: the first failure is told, and then the tracker is left out."""

from __future__ import annotations

from collections.abc import Mapping

from areal.monitor.trackers import TrackerGroup


class Noting:
    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.logged: list[tuple[int, Mapping[str, float]]] = []
        self.closed = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.fails_at:
            raise OSError(28, "No space left on device")
        self.logged.append((step, metrics))

    def close(self) -> None:
        self.closed += 1
        if self.fails_at == -1:
            raise RuntimeError("the service is down")


def test_everybody_hears_of_every_step() -> None:
    one, two, told = Noting(), Noting(), []
    group = TrackerGroup([("one", one), ("two", two)], told.append)
    for step in (1, 2):
        group.log(step, {"x": float(step)})
    group.close()
    assert one.logged == two.logged == [(1, {"x": 1.0}), (2, {"x": 2.0})]
    assert (one.closed, two.closed, told) == (1, 1, [])


def test_a_failing_tracker_is_told_once_and_left_out() -> None:
    bad, good, told = Noting(fails_at=2), Noting(), []
    group = TrackerGroup([("bad", bad), ("good", good)], told.append)
    for step in range(5):
        group.log(step, {})
    group.close()
    assert told == ["tracker 'bad' failed and is left out from now on: OSError: [Errno 28] No space left on device"]
    assert [step for step, _ in bad.logged] == [0, 1] and bad.closed == 0
    assert [step for step, _ in good.logged] == [0, 1, 2, 3, 4] and good.closed == 1


def test_a_tracker_that_cannot_close_stops_nobody() -> None:
    bad, good, told = Noting(fails_at=-1), Noting(), []
    TrackerGroup([("bad", bad), ("good", good)], told.append).close()
    assert told == ["tracker 'bad' failed and is left out from now on: RuntimeError: the service is down"]
    assert good.closed == 1
