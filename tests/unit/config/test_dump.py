"""What is printed loads again to an equal configuration, whatever it holds."""

import math

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal.config import RunConfig, dump, load_recipe, to_plain
from areal.config.check import problems

TEXT = st.text(max_size=12).filter(lambda text: not any(0xD800 <= ord(letter) <= 0xDFFF for letter in text))
NAME = st.text("abcdefgXYZ0123456789.-_ e+", min_size=1, max_size=8).filter(lambda text: text.strip(". ") == text)
POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
OPTION = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


def options(*taken: str):
    return st.dictionaries(TEXT.filter(lambda key: key not in taken), OPTION, max_size=3)


def block(*, own=None, **fields):
    """A dict with any subset of `fields`, and options of a component's own."""
    fixed = st.fixed_dictionaries({}, optional=fields)
    return st.builds(lambda a, b: {**a, **b}, own, fixed) if own is not None else fixed


RECIPES = block(
    name=NAME,
    seed=st.integers(0, 2**32 - 1),
    runs_dir=TEXT,
    device=TEXT,
    model=block(name=TEXT, path=TEXT, dtype=st.sampled_from(["float32", "bfloat16", "float16"])),
    training=block(
        learning_rate=POSITIVE,
        max_steps=st.integers(1, 10**9),
        betas=st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2),
        amp=block(enabled=st.booleans(), dtype=st.just("fp16"), loss_scale=st.just("dynamic") | POSITIVE),
        warmup=block(steps=st.integers(0, 99), learning_rate=POSITIVE),
    ),
    sampling=block(top_p=st.floats(0, 1, exclude_min=True), stop_token_ids=st.lists(st.integers(0, 9), max_size=3)),
    environments=st.lists(
        block(own=options("name", "type", "weight"), name=NAME, weight=POSITIVE), min_size=1, max_size=3
    ).map(
        lambda entries: [
            {"type": f"task{i}", **entry, "name": f"{i}{entry.get('name', '')}"} for i, entry in enumerate(entries)
        ]
    ),
    engine=block(own=options("name", "replicas", "python"), name=TEXT, replicas=st.integers(1, 3)),
    reshard=block(own=options("name"), name=NAME).map(lambda table: {"name": "disk", **table}),
    trackers=st.lists(
        NAME | block(own=options("name"), name=NAME).map(lambda table: {"name": "w", **table}), max_size=2
    ),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(RECIPES)
def test_dump_loads_to_an_equal_configuration(tmp_path_factory, recipe):
    config = RunConfig.model_validate(recipe)
    if list(problems(config)):
        return
    path = tmp_path_factory.mktemp("dump") / "r.yaml"
    path.write_text(dump(config), encoding="utf-8")
    again = load_recipe(str(path))
    assert again == config
    assert to_plain(again) == to_plain(config)


def test_dump_is_complete_and_plain():
    plain = yaml.safe_load(dump(load_recipe()))
    assert plain == to_plain(load_recipe())
    assert set(plain) == set(RunConfig.model_fields)
    assert isinstance(plain["training"]["learning_rate"], float) and isinstance(plain["training"]["betas"], list)
    assert plain["environments"][0] == {"name": "reverse", "type": "reverse_digits", "weight": 1.0}


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinite_options_survive(tmp_path, value):
    config = RunConfig.model_validate({"engine": {"name": "x", "limit": value}})
    path = tmp_path / "r.yaml"
    path.write_text(dump(config))
    assert load_recipe(str(path)).engine.options == {"limit": value}
