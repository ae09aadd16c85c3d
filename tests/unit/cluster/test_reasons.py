"""From evidence to one sentence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.cluster.ray.placement import fitting
from areal.cluster.reasons import EXIT_LINE, FATAL_LINE, STACK_LINE, root_cause, said_by_ray, with_tail
from areal.contracts.cluster import Room

QUIET = (7, 7)


@pytest.mark.parametrize(
    ("status", "words", "oom_kills", "said"),
    [
        (0, [], QUIET, "it exited with code 0"),
        (3, [STACK_LINE], QUIET, "it exited with code 3"),
        (-15, [], QUIET, "it was ended by SIGTERM"),
        (-64, [], QUIET, "it was ended by SIGRTMAX"),
        (-9, [], QUIET, "killed from outside (SIGKILL): nothing in its log, no out-of-memory event on its machine"),
        (-9, [], (7, 9), "out of memory: the kernel killed it (such kills on its machine while it ran: 2)"),
        (-11, [], (7, 9), "it was ended by SIGSEGV"),
        (None, [f"{EXIT_LINE}5"], QUIET, "it exited with code 5"),
        (None, [f"{FATAL_LINE}Bus error", STACK_LINE], QUIET, "it was ended by SIGBUS"),
        (None, [f"{FATAL_LINE}none_dealloc"], QUIET, "it failed: none_dealloc"),
        (None, [STACK_LINE], QUIET, "it was ended by SIGTERM"),
        (None, [], (7, 8), "out of memory: the kernel killed it (such kills on its machine while it ran: 1)"),
    ],
)
def test_root_causes(status: int | None, words: list[str], oom_kills: tuple[int, int], said: str) -> None:
    assert root_cause(status, words, oom_kills) == said


def test_what_nobody_knows_is_said_so() -> None:
    assert "as far as anybody can know" in root_cause(None, [], QUIET)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("The actor is dead because it was killed by `ray.kill`.", "it was ended by the controller"),
        (
            "The actor died because its node has died. Node Id: 8f\n\tthe actor's node was terminated unexpectedly: "
            "health check failed due to missing too many heartbeats",
            "its node 10.0.0.7 died: health check failed due to missing too many heartbeats",
        ),
        ("Worker exit type: NODE_OUT_OF_MEMORY", "out of memory: Ray's memory monitor killed it because its node"),
        ("Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits", ""),
    ],
)
def test_what_ray_knows(text: str, said: str) -> None:
    found = said_by_ray(RuntimeError(text), "10.0.0.7")
    assert found.startswith(said) and bool(found) == bool(said) and "\n" not in found


def test_the_log_comes_last() -> None:
    assert with_tail("why", "line") == "why; its log ends with:\nline"
    assert with_tail("why", "") == "why"


SIZES = st.lists(st.fixed_dictionaries({"infer": st.integers(0, 5), "train": st.integers(0, 5)}), max_size=5)


@given(SIZES, st.integers(1, 3), st.integers(1, 8), st.booleans())
def test_what_fits_never_exceeds_what_is_there(nodes: list[dict[str, int]], each: int, count: int, apart: bool) -> None:
    engines = Room(kind="engine", resources={"infer": float(each)}, count=count, least=1)
    trainer = Room(kind="trainer", resources={"train": float(each)}, count=count, least=1, apart=apart)
    trained, served = fitting([trainer, engines], nodes)
    assert served.count == min(count, sum(node["infer"] // each for node in nodes))
    most = sum(min(1, node["train"] // each) if apart else node["train"] // each for node in nodes)
    assert trained.count == min(count, most)


def test_the_first_room_is_served_first() -> None:
    rooms = [Room(kind=kind, resources={"GPU": 2.0}, count=1, least=1) for kind in ("trainer", "engine")]
    assert [room.count for room in fitting(rooms, [{"GPU": 3.0}, {"GPU": 1.0}])] == [1, 0]
