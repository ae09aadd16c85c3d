"""The scheduler: who is admitted, who is sent back, where rows live."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.builtins.transformers_engine.scheduler import Row, Scheduler
from areal.contracts.messages import Completion, GenerateRequest, Sampling


class Loop:
    loop: asyncio.AbstractEventLoop


@pytest.fixture(autouse=True, scope="module")
def event_loop_for_futures() -> Iterator[None]:
    Loop.loop = asyncio.new_event_loop()
    yield
    Loop.loop.close()


def row(length: int = 4, first: int = 1, limit: int = 8, num_tokens: int = 0) -> Row:
    request = GenerateRequest(
        uid="r", prompt_ids=(first, *[2] * (length - 1)), sampling=Sampling(max_new_tokens=limit), seed=0
    )
    future: asyncio.Future[Completion] = Loop.loop.create_future()
    made = Row(request, frozenset({99}), future)
    for _ in range(num_tokens):
        made.add(3, -1.0, 0)
    return made


def scheduler(max_batch: int = 16, max_prefill_tokens: int = 8192, max_kv_tokens: int = 10_000) -> Scheduler:
    return Scheduler(max_batch, max_prefill_tokens, max_kv_tokens)


def test_equal_prompts_are_prefilled_once() -> None:
    made = scheduler()
    made.waiting.extend(row(first=i // 4) for i in range(12))
    prefill = made.admit()
    assert prefill is not None
    assert [context[0] for context in prefill.contexts] == [0, 1, 2]
    assert prefill.sources == [0] * 4 + [1] * 4 + [2] * 4
    assert made.running == prefill.rows


def test_prompts_of_very_different_length_have_passes_of_their_own() -> None:
    made = scheduler()
    made.waiting.extend([row(10, first=0), row(2000, first=1), row(12, first=2), row(1900, first=3)])
    first, second, third = made.admit(), made.admit(), made.admit()
    assert first is not None and second is not None
    assert [len(context) for context in first.contexts] == [10, 12]
    assert [len(context) for context in second.contexts] == [2000, 1900]
    assert third is None


def test_a_pass_holds_at_most_max_prefill_tokens_but_at_least_one_prompt() -> None:
    made = scheduler(max_prefill_tokens=25)
    made.waiting.extend([row(10, first=i) for i in range(3)] + [row(400, first=9)])
    sizes = [len(prefill.contexts) for prefill in iter(made.admit, None)]
    assert sizes == [2, 1, 1]


def test_single_free_slots_wait_for_others() -> None:
    made = scheduler(max_batch=16)
    made.waiting.extend(row(first=i) for i in range(30))
    assert made.admit()
    assert len(made.running) == 16
    made.remove([made.running[3]])
    assert made.admit() is None, "one of sixteen is less than an eighth"
    made.remove([made.running[3]])
    prefill = made.admit()
    assert prefill is not None and len(prefill.rows) == 2


def test_the_last_waiting_row_needs_only_its_own_slot() -> None:
    made = scheduler(max_batch=16)
    made.waiting.extend(row(first=i) for i in range(17))
    made.admit()
    made.remove([made.running[0]])
    assert made.admit()
    assert not made.waiting


def test_the_kv_bound_admits_in_order_and_always_one() -> None:
    made = scheduler(max_kv_tokens=50)
    made.waiting.extend([row(100, first=0), row(10, first=1)])
    assert made.admit() and len(made.running) == 1, "one request may exceed the bound"
    assert made.admit() is None
    made.remove(list(made.running))
    made.waiting.extend(row(10, first=i) for i in range(2, 9))
    assert made.admit()
    assert [r.request.prompt_ids[0] for r in made.running] == [1, 2, 3, 4], "4 rows of 12 fit into 50"


def test_the_youngest_are_sent_back_when_the_cache_is_full() -> None:
    made = scheduler(max_kv_tokens=60)
    rows = [row(10, first=i, limit=50, num_tokens=n) for i, n in enumerate([9, 2, 5, 1])]
    made.running.extend(rows)
    assert made.overflow(15) == []
    back = made.overflow(20)
    assert back == [rows[3]]
    assert made.send_back(back) == []
    assert (list(made.waiting), made.running) == ([rows[3]], rows[:3])
    assert made.overflow(1000) == [rows[1], rows[2]], "the oldest goes on alone"


def test_drop_forgets_waiting_and_running_rows() -> None:
    made = scheduler()
    waiting, running, other = row(), row(), row()
    made.waiting.append(waiting)
    made.running.extend([running, other])
    assert made.drop(waiting) == []
    assert made.drop(running) == [(1, 0)]
    assert made.drop(running) == []
    assert (list(made.waiting), made.running) == ([], [other])


def test_a_row_ends_at_stop_tokens_and_at_its_limit() -> None:
    made = row(limit=3)
    assert made.add(5, -1.0, 2) is None
    assert made.add(99, -1.0, 2) == "stop"
    short = row(limit=1)
    assert short.add(5, -0.5, 7) == "length"
    short.finish("length")
    completion = short.future.result()
    assert (completion.token_ids, completion.logprobs, completion.versions) == ((5,), (-0.5,), (7,))


@given(st.lists(st.booleans(), min_size=1, max_size=30))
@settings(max_examples=100, deadline=None)
def test_moves_keep_every_survivor_in_a_slot_below_their_number(gone: list[bool]) -> None:
    made = scheduler(max_batch=64)
    rows = [row(first=i) for i in range(len(gone))]
    made.running.extend(rows)
    slots: list[Row | None] = list(rows)
    moves = made.remove([r for r, is_gone in zip(rows, gone, strict=True) if is_gone])
    assert not {source for source, _ in moves} & {target for _, target in moves}
    for source, target in moves:
        slots[target] = slots[source]
    assert made.running == slots[: len(made.running)]
    assert set(map(id, made.running)) == {id(r) for r, is_gone in zip(rows, gone, strict=True) if not is_gone}
