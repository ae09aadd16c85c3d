"""The door: plugins that are whole, broken, blocked, misspelt or of another API, made on the fly."""

from __future__ import annotations

import logging
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal import API
from areal.contracts.transfer import Layout
from areal.errors import MissingLibrary, PluginError, UnknownComponent
from areal.plugins import KINDS, PluginRow, Plugins, discover

pytestmark = pytest.mark.usefixtures("only_core")

Install = Callable[..., None]
GOOD = """
from areal import Component, hookimpl

@hookimpl
def areal_engines():
    return [Component(name={name!r}, factory="nowhere.engine:Engine", summary="Says nothing.")]
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return install(distribution, code, name=..., version=...): what pip would leave behind, without pip."""
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = []

    def install(distribution: str, code: str, *, name: str = "", version: str = "1.0") -> None:
        module = distribution.replace("-", "_") + "_hooks"
        modules.append(module)
        (tmp_path / f"{module}.py").write_text(code)
        info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        entry = name or distribution.removeprefix("areal-")
        (info / "entry_points.txt").write_text(f"[areal]\n{entry} = {module}\n")

    yield install
    for module in modules:
        sys.modules.pop(module, None)


def row(plugins: Plugins, name: str) -> PluginRow:
    (found,) = [row for row in plugins.rows() if row.name == name]
    return found


def test_the_builtins_enter_by_the_same_door() -> None:
    builtin = row(discover(), "builtin")
    assert (builtin.distribution, builtin.state, builtin.reason) == ("areal-core", "loaded", "")
    assert set(KINDS.values()) <= set(builtin.hooks)
    assert {offer.kind for offer in builtin.offers} == set(KINDS)


def test_a_plugin_is_loaded_and_its_offer_found(install: Install) -> None:
    install("areal-fast", GOOD.format(name="fast"), version="0.3.1")
    plugins = discover()
    found = row(plugins, "fast")
    assert (found.owner, found.state, found.hooks) == ("areal-fast 0.3.1", "loaded", ("areal_engines",))
    assert list(plugins.offers("engine")) == ["fast", "sim", "transformers"]
    component = plugins.resolve("engine", "fast")
    assert component.summary == "Says nothing."
    assert pickle.loads(pickle.dumps(component)) == component


def test_each_entry_point_is_loaded_once(install: Install, tmp_path: Path) -> None:
    install("areal-fast", GOOD.format(name="fast"))
    twin = tmp_path / "areal_twin-1.0.dist-info"
    twin.mkdir()
    (twin / "METADATA").write_text("Metadata-Version: 2.1\nName: areal-twin\nVersion: 1.0\n")
    (twin / "entry_points.txt").write_text("[areal]\ntwin = areal_fast_hooks\n")
    plugins = discover()
    assert len(plugins.offers("engine")["fast"]) == 1
    assert [found.name for found in plugins.rows()] == ["builtin", "fast"]


BROKEN = {
    "import": ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
    "syntax": ("def (", "SyntaxError"),
    "exit": ("raise SystemExit(3)", "SystemExit: 3"),
    "raises": ("1 / 0", "ZeroDivisionError: division by zero"),
    "misspelt": (
        "from areal import hookimpl\n@hookimpl\ndef areal_engine():\n    return []",
        "'areal_engine' is no hook; did you mean 'areal_engines'?",
    ),
    "unmarked": (
        "def areal_engines():\n    return []",
        "'areal_engines' is not marked @hookimpl; mark it, or do not begin its name with 'areal_'",
    ),
    "arguments": (
        "from areal import hookimpl\n@hookimpl\ndef areal_step_finished(report, loss):\n    pass",
        "Argument(s) {'loss'} are declared in the hookimpl but can not be found in the hookspec",
    ),
    "offer raises": (
        "from areal import hookimpl\n@hookimpl\ndef areal_engines():\n    raise ValueError('not\\ntoday')",
        "areal_engines raised ValueError: not today",
    ),
    "offer raises late": (
        "from areal import hookimpl\n@hookimpl\ndef areal_engines():\n    yield from ()\n    exit()",
        "areal_engines raised SystemExit",
    ),
    "offer of text": (
        "from areal import hookimpl\n@hookimpl\ndef areal_engines():\n    return ['vllm']",
        "areal_engines offers 'vllm', which is no areal.Component",
    ),
    "offer of nothing": (
        "from areal import hookimpl\n@hookimpl\ndef areal_engines():\n    pass",
        "areal_engines returned None, not a list of areal.Component",
    ),
    "offer of one": (
        "from areal import Component, hookimpl\n@hookimpl\ndef areal_engines():\n"
        "    return Component(name='x', factory='a:B')",
        "not a list of areal.Component",
    ),
    "offer twice": (
        "from areal import Component, hookimpl\n@hookimpl\ndef areal_engines():\n"
        "    return [Component(name='x', factory='a:B')] * 2",
        "areal_engines offers 'x' twice",
    ),
    "offer without colon": (
        "from areal import Component, hookimpl\n@hookimpl\ndef areal_engines():\n"
        "    return [Component(name='x', factory='a.B')]",
        "engine 'x' names 'a.B', which is not 'package.module:Name'",
    ),
    "offer without name": (
        "from areal import Component, hookimpl\n@hookimpl\ndef areal_engines():\n"
        "    return [Component(name='', factory='a:B')]",
        "a component of kind 'engine' is named ''",
    ),
}


@pytest.mark.parametrize(("code", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_plugin_is_a_row_and_the_others_work(install: Install, code: str, reason: str) -> None:
    install("areal-bad", code)
    install("areal-fast", GOOD.format(name="fast"))
    plugins = discover()
    broken = row(plugins, "bad")
    assert broken.state == "broken"
    assert reason in broken.reason and "\n" not in broken.reason
    assert list(plugins.offers("engine")) == ["fast", "sim", "transformers"]
    with pytest.raises(UnknownComponent) as caught:
        plugins.resolve("engine", "bad")
    assert str(caught.value) == f"no engine named 'bad'; the plugin areal-bad 1.0 is broken: {broken.reason}"


def test_a_keyboard_interrupt_is_no_broken_plugin(install: Install) -> None:
    install("areal-bad", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        discover()


def test_a_function_that_a_plugin_imported_is_not_its_own(install: Install, tmp_path: Path) -> None:
    (tmp_path / "elsewhere_areal.py").write_text("def areal_home():\n    return 1")
    install("areal-fast", "from elsewhere_areal import areal_home\n" + GOOD.format(name="fast"))
    assert row(discover(), "fast").state == "loaded"


def test_an_optional_hook_of_another_version_is_no_mistake(install: Install) -> None:
    install(
        "areal-new", "from areal import hookimpl\n@hookimpl(optionalhook=True)\ndef areal_of_the_future():\n    pass"
    )
    assert row(discover(), "new").state == "loaded"


def test_another_api_is_refused_as_a_whole(install: Install) -> None:
    code = GOOD.format(name="old").replace("summary=", f"api={API + 1}, summary=")
    install("areal-ancient", code + "\n@hookimpl\ndef areal_detect_accelerator():\n    return 'abacus'\n")
    plugins = discover()
    refused = row(plugins, "ancient")
    assert refused.state == "broken"
    assert refused.reason == (
        f"'old' is made for hook API {API + 1}, and this AReaL has API {API}; "
        "install a version of areal-ancient made for it"
    )
    assert plugins.ask("areal_detect_accelerator") == "cpu"
    with pytest.raises(UnknownComponent, match=f"no engine named 'old'; the plugin areal-ancient 1.0.*API {API + 1}"):
        plugins.resolve("engine", "old")


@pytest.mark.parametrize("name", ["spy", "areal-spy", "Areal_Spy"])
def test_a_blocked_plugin_is_not_even_imported(install: Install, name: str) -> None:
    install("areal-spy", "raise AssertionError('imported')")
    blocked = row(discover([name]), "spy")
    assert (blocked.state, blocked.reason) == ("blocked", f"--block {name}")
    assert "areal_spy_hooks" not in sys.modules


def test_the_environment_blocks_too(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("areal-spy", "raise AssertionError('imported')")
    monkeypatch.setenv("AREAL_BLOCK", "spy, builtin")
    plugins = discover()
    assert [(found.state, found.reason) for found in plugins.rows()] == [
        ("blocked", "AREAL_BLOCK=builtin"),
        ("blocked", "AREAL_BLOCK=spy"),
    ]
    with pytest.raises(UnknownComponent, match=r"no engine named 'spy'; the plugin areal-spy 1\.0 is blocked: AREAL_"):
        plugins.resolve("engine", "spy")
    with pytest.raises(UnknownComponent, match="installed: none"):
        plugins.resolve("engine", "transformers")


def test_blocking_nobody_is_an_error() -> None:
    with pytest.raises(PluginError) as caught:
        discover(["buitlin"])
    assert str(caught.value).startswith("--block buitlin names no plugin; installed: areal-core, builtin")
    assert str(caught.value).endswith("; did you mean 'builtin'?")
    assert discover(["buitlin"], missing_ok=True).rows()[0].state == "loaded", "it may be installed elsewhere"


def test_two_offers_of_one_name_name_both_distributions(install: Install) -> None:
    install("areal-one", GOOD.format(name="fast"))
    install("areal-two", GOOD.format(name="fast"), version="2.0")
    install("areal-three", GOOD.format(name="other"))
    plugins = discover()
    assert {found.state for found in plugins.rows()} == {"loaded"}
    with pytest.raises(PluginError) as caught:
        plugins.resolve("engine", "fast")
    sentence = "engine 'fast' is offered by areal-one 1.0 and by areal-two 2.0; keep one and --block the other"
    assert str(caught.value) == sentence
    assert [plugins.obstacle(offer) for offer in plugins.offers("engine")["fast"]] == [sentence] * 2
    assert plugins.resolve("engine", "other").name == "other"
    assert discover(["areal-two"]).resolve("engine", "fast").name == "fast"


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(UnknownComponent) as caught:
        discover().resolve("cluster", "rya")
    assert str(caught.value) == "no cluster named 'rya'; installed: inline, ray, sim; did you mean 'ray'?"


@given(name=st.text(max_size=12), kind=st.sampled_from(sorted(KINDS)))
def test_any_name_resolves_or_is_refused_in_one_line(name: str, kind: str) -> None:
    plugins = BUILTIN
    try:
        assert plugins.resolve(kind, name).name == name
    except PluginError as error:
        assert "\n" not in str(error)


BUILTIN = discover()


def test_a_missing_library_is_an_obstacle_with_the_command(install: Install) -> None:
    code = GOOD.format(name="heavy").replace(
        "summary=", "requires=('no_such_lib',), install='pip install it', summary="
    )
    install("areal-heavy", code)
    plugins = discover()
    (offer,) = plugins.offers("engine")["heavy"]
    assert row(plugins, "heavy").state == "loaded"
    assert plugins.obstacle(offer) == (
        "'heavy' needs no_such_lib, which is not installed; install it with: pip install it"
    )
    with pytest.raises(MissingLibrary):
        plugins.resolve("engine", "heavy").load()


OWN_TASK = """
from areal.contracts.options import Options

class Own:
    def __init__(self, options, context):
        self.options = options
    def prompts(self, split):
        return []
    async def episode(self, prompt, client):
        raise NotImplementedError

class OwnOptions(Options):
    level: int = 1

class Bare:
    prompts = episode = lambda self: None

class Half:
    prompts = lambda self: None
"""


@pytest.fixture
def own_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_own_task.py").write_text(OWN_TASK)
    yield "my_own_task"
    sys.modules.pop("my_own_task", None)


def test_a_class_of_ones_own_is_an_environment(own_task: str) -> None:
    component = BUILTIN.resolve("environment", f"{own_task}:Own")
    options = component.parse_options({"level": 3})
    assert component.load()(options, None).options.level == 3
    assert BUILTIN.resolve("environment", f"{own_task}:Bare").options is None


def test_a_class_of_ones_own_may_lie_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_near_task.py").write_text(OWN_TASK)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    monkeypatch.chdir(tmp_path)
    assert BUILTIN.resolve("environment", "my_near_task:Own").options == "my_near_task:OwnOptions"
    assert sys.path[-1] == str(tmp_path)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("my_own_task:Half", "'my_own_task:Half' is no environment: it has no method episode"),
        ("my_own_task:OwnOptions", "it has no method prompts and no episode"),
        ("my_own_task:Owm", "module 'my_own_task' has no 'Owm'"),
        ("my_other_task:Own", "No module named 'my_other_task'"),
        ("my_own_task:", "is not of the form 'package.module:Class'"),
    ],
)
def test_a_class_that_is_none_is_refused_at_once(own_task: str, path: str, sentence: str) -> None:
    with pytest.raises(PluginError) as caught:
        BUILTIN.resolve("environment", path)
    assert sentence in str(caught.value)


def test_only_environments_are_classes_of_ones_own(own_task: str) -> None:
    with pytest.raises(UnknownComponent):
        BUILTIN.resolve("engine", f"{own_task}:Own")


ANNOUNCED = """
from areal import hookimpl
heard = []

@hookimpl(tryfirst={first})
def areal_weights_published(version):
    heard.append(version)
    {then}
"""


def test_an_announcement_reaches_everybody_whatever_one_does(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("areal-first", ANNOUNCED.format(first=True, then="raise RuntimeError('no disk')"))
    install("areal-second", ANNOUNCED.format(first=False, then="raise SystemExit"))
    install("areal-third", ANNOUNCED.format(first=False, then=""))
    with caplog.at_level(logging.WARNING):
        discover().announce("areal_weights_published", version=7)
    heard = [sys.modules[f"areal_{name}_hooks"].heard for name in ("first", "second", "third")]
    assert heard == [[7], [7], [7]]
    assert [record.getMessage() for record in caplog.records] == [
        "plugin 'areal-first/first' failed in areal_weights_published and was passed over: RuntimeError: no disk",
        "plugin 'areal-second/second' failed in areal_weights_published and was passed over: SystemExit",
    ]


@pytest.mark.parametrize(
    ("source", "target", "chosen"),
    [
        (Layout(host="a"), Layout(host="a"), "xccl"),
        (Layout(host="a", address="10.0.0.1"), Layout(host="b"), "xccl"),
        (Layout(host="a"), Layout(host="b"), "disk"),
        (Layout(host="a", collective="nccl"), Layout(host="a"), "disk"),
    ],
)
def test_the_builtin_answer_about_roads(source: Layout, target: Layout, chosen: str) -> None:
    assert BUILTIN.ask("areal_choose_resharder", source=source, target=target) == chosen


def test_a_plugins_answer_comes_before_the_builtin_one(install: Install) -> None:
    install("areal-tpu", "from areal import hookimpl\n@hookimpl\ndef areal_detect_accelerator():\n    return 'tpu'")
    assert discover().ask("areal_detect_accelerator") == "tpu"


def test_a_plugin_that_fails_to_answer_is_named(install: Install) -> None:
    install(
        "areal-bad", "from areal import hookimpl\n@hookimpl\ndef areal_detect_accelerator():\n    raise OSError('dead')"
    )
    with pytest.raises(PluginError, match="plugin 'areal-bad/bad' failed in areal_detect_accelerator: OSError: dead"):
        discover().ask("areal_detect_accelerator")


def test_a_run_says_which_plugins_are_broken(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from areal.app import run
    from areal.config import RunConfig

    install("areal-typo", "from areal import hookimpl\n@hookimpl\ndef areal_step_finnished(report):\n    pass")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownComponent):
        run(RunConfig.model_validate({"engine": {"name": "nobody"}}))
    assert "plugin areal-typo 1.0 is broken and not used: " in caplog.text and "areal_step_finished" in caplog.text
