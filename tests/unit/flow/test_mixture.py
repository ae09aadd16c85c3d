"""The order of prompts: exact shares, whole epochs, and nothing but the position decides."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.errors import ConfigError
from areal.flow.prompts.mixture import Mixture, Source

WEIGHTS = st.one_of(st.integers(1, 50).map(float), st.floats(1e-3, 1e3), st.sampled_from([0.1, 0.2, 0.3, 0.6, 0.4]))
SOURCES = st.lists(st.tuples(WEIGHTS, st.integers(1, 7)), min_size=1, max_size=10).map(
    lambda pairs: [
        Source(name=f"s{number}", weight=weight, num_prompts=num) for number, (weight, num) in enumerate(pairs)
    ]
)


def draw(mixture: Mixture, count: int) -> list[tuple[str, int]]:
    return [mixture.next() for _ in range(count)]


def test_the_documented_order() -> None:
    sources = [Source(name="a", weight=3, num_prompts=2), Source(name="b", weight=1, num_prompts=2)]
    assert "".join(name for name, _ in draw(Mixture(sources, 0), 8)) == "aaabaaab"


@given(SOURCES)
@settings(max_examples=60, deadline=None)
def test_shares_are_exact_at_every_prefix(sources: list[Source]) -> None:
    total = sum(Fraction(source.weight) for source in sources)
    shares = {source.name: float(Fraction(source.weight) / total) for source in sources}
    mixture, drawn = Mixture(sources, 1), Counter[str]()
    for position in range(1, 201):
        drawn[mixture.next()[0]] += 1
        assert max(abs(share * position - drawn[name]) for name, share in shares.items()) < 1 + 1e-9
    assert mixture.position == 200


def test_shares_that_the_furthest_behind_rule_misses() -> None:
    """Always drawing the environment that is furthest behind leaves one of these 1.18 prompts behind."""
    weights = [0.003092, 0.225743, 0.721362, 0.619193, 43.0, 0.312983, 0.988737, 43.0, 0.675123, 0.691988]
    sources = [Source(name=str(number), weight=weight, num_prompts=5) for number, weight in enumerate(weights)]
    drawn, mixture = Counter[str](), Mixture(sources, 0)
    for position in range(1, 1001):
        drawn[mixture.next()[0]] += 1
        assert max(abs(s.weight / sum(weights) * position - drawn[s.name]) for s in sources) < 1


@given(SOURCES, st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_every_epoch_is_a_permutation(sources: list[Source], seed: int) -> None:
    indices: dict[str, list[int]] = {source.name: [] for source in sources}
    for name, index in draw(Mixture(sources, seed), 200):
        indices[name].append(index)
    for source in sources:
        size, drawn = source.num_prompts, indices[source.name]
        for begin in range(0, len(drawn) - size + 1, size):
            assert sorted(drawn[begin : begin + size]) == list(range(size))


def test_epochs_and_seeds_differ() -> None:
    source = [Source(name="a", weight=1, num_prompts=50)]
    first, second = Mixture(source, 1), Mixture(source, 2)
    one, two = draw(first, 50), draw(first, 50)
    assert sorted(one) == sorted(two) and one != two
    assert draw(second, 50) != one
    assert draw(Mixture(source, "1/warm-up"), 50) != one


@given(SOURCES, st.integers(0, 120), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_skipping_equals_drawing(sources: list[Source], position: int, seed: int) -> None:
    drawn, skipped = Mixture(sources, seed), Mixture(sources, seed)
    draw(drawn, position)
    skipped.skip_to(position)
    assert skipped.position == drawn.position == position
    assert draw(skipped, 30) == draw(drawn, 30)


def test_no_way_back() -> None:
    mixture = Mixture([Source(name="a", weight=1, num_prompts=1)], 0)
    mixture.skip_to(3)
    with pytest.raises(ValueError, match="at 3 and cannot go back to 2"):
        mixture.skip_to(2)


def test_weight_0_never_draws_and_needs_no_prompts() -> None:
    sources = [Source(name="off", weight=0, num_prompts=0), Source(name="on", weight=0.5, num_prompts=3)]
    assert {name for name, _ in draw(Mixture(sources, 0), 30)} == {"on"}


def test_what_cannot_be_mixed() -> None:
    with pytest.raises(ConfigError, match="no environment has a weight above 0; give at least one"):
        Mixture([Source(name="a", weight=0, num_prompts=3)], 0)
    with pytest.raises(ConfigError, match="environment 'a' has no training prompts; give it data or weight 0"):
        Mixture([Source(name="a", weight=1, num_prompts=0)], 0)
