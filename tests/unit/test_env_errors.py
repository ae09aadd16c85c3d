"""The environment's reader, and the hint for misspelt names."""

from __future__ import annotations

import os

import pytest

from areal import env, errors
from areal.errors import did_you_mean


@pytest.mark.parametrize(
    ("value", "blocked"),
    [(None, ()), ("", ()), ("a", ("a",)), (" a, b ,,c ", ("a", "b", "c"))],
)
def test_blocked_plugins(monkeypatch: pytest.MonkeyPatch, value: str | None, blocked: tuple[str, ...]) -> None:
    monkeypatch.delenv("AREAL_BLOCK", raising=False)
    if value is not None:
        monkeypatch.setenv("AREAL_BLOCK", value)
    assert env.blocked_plugins() == blocked


@pytest.mark.parametrize(("value", "asked"), [(None, False), ("", False), ("0", False), ("1", True), ("yes", True)])
def test_debug_mode(monkeypatch: pytest.MonkeyPatch, value: str | None, asked: bool) -> None:
    monkeypatch.delenv("AREAL_DEBUG_MODE", raising=False)
    if value is not None:
        monkeypatch.setenv("AREAL_DEBUG_MODE", value)
    assert env.debug_mode() is asked


def test_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_HOME", "somewhere")
    assert env.cache_dir() == "somewhere"
    monkeypatch.setenv("AREAL_HOME", "")
    monkeypatch.setenv("HOME", "home-of-somebody")
    assert env.cache_dir() == "home-of-somebody/.cache/areal"


def test_apply_overwrites_and_setdefault_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_TEST_A", "user")
    monkeypatch.setenv("AREAL_TEST_B", "to be removed by monkeypatch")
    monkeypatch.delenv("AREAL_TEST_B")
    env.setdefault({"AREAL_TEST_A": "ours", "AREAL_TEST_B": "ours"})
    assert (os.environ["AREAL_TEST_A"], os.environ["AREAL_TEST_B"]) == ("user", "ours")
    env.apply({"AREAL_TEST_A": "forced"})
    assert os.environ["AREAL_TEST_A"] == "forced"


def test_hints() -> None:
    assert did_you_mean("gpro", ["ppo", "grpo"]) == "; did you mean 'grpo'?"
    assert did_you_mean("gpro", iter(["grpo"])) == "; did you mean 'grpo'?"
    assert did_you_mean("zebra", ["ppo", "grpo"]) == did_you_mean("x", []) == ""


def test_every_error_is_one_that_the_command_line_prints_as_a_line() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(classes) > 8
    assert all(issubclass(error, errors.ArealError) for error in classes)
    assert issubclass(errors.WorkerDied, errors.WorkerFailed), "whoever handles a failure handles a death"
