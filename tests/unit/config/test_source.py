"""Files: which one is meant, and YAML that is not right."""

import pytest

from areal.config.source import bundled_recipes, find_recipe, read_document
from areal.errors import ConfigError


@pytest.fixture
def read(tmp_path):
    def read(content: str | bytes):
        path = tmp_path / "r.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_document(path)

    return read


def test_values_remember_their_lines(read):
    document = read("a: 1\nb:\n  c: 2\n  d:\n  - x\n  -\n    e: 3\n")
    assert document.data == {"a": 1, "b": {"c": 2, "d": ["x", {"e": 3}]}}
    lines = {path: document.place(path).rpartition(":")[2] for path in [("a",), ("b", "c"), ("b", "d", 1, "e")]}
    assert lines == {("a",): "1", ("b", "c"): "3", ("b", "d", 1, "e"): "7"}
    assert document.place(("b", "zzz")).endswith(":2")  # the nearest block around it
    assert document.place(("zzz",)) == document.origin


def test_merge_keys_and_aliases_are_read(read):
    document = read("base: &base {x: 1, y: 2}\na: {<<: *base, y: 3}\nb: {<<: *base}\nc: *base\n")
    assert document.data["a"] == {"x": 1, "y": 3}
    assert document.data["b"] == document.data["c"] == {"x": 1, "y": 2}


def test_dates_and_the_words_of_yaml(read):
    assert read("a: 2024-01-01\nb: yes\nc: ~\nd: 0x10\ne: '1'\nf: 1_000").data == {
        **{"a": "2024-01-01", "b": True, "c": None},
        **{"d": 16, "e": "1", "f": 1000},
    }


def test_byte_order_mark_is_harmless(read):
    assert read("\ufeffa: 1").data == {"a": 1}


BROKEN = {
    "a: 1\na: 2": "r.yaml:2: key 'a' stands twice, first in line 1; keep one",
    "x:\n  b: {c: 1,\n   c: 2}": "r.yaml:3: key 'c' stands twice, first in line 2; keep one",
    "a: [1, 2": "r.yaml:1: not valid YAML: ",
    "a: 1\n\tb: 2": "r.yaml:2: not valid YAML: ",
    "a: b: c": "r.yaml:1: not valid YAML: mapping values are not allowed here",
    "a: *nothing": "r.yaml:1: not valid YAML: found undefined alias 'nothing'",
    "a: 1\n---\nb: 2": "r.yaml:2: not valid YAML: ",
    "a: &a [*a]": "r.yaml: nested too deeply, or a value that contains itself",
    "a: " + "[" * 600: "r.yaml: nested too deeply, or a value that contains itself",
    "- a\n- b": "r.yaml: a recipe is a mapping of keys to values, but this is a list of 2",
    "hello": "r.yaml: a recipe is a mapping of keys to values, but this is 'hello'",
    "1: a": "r.yaml:1: keys are texts, but '1' is not; put it in quotes",
    "on: a": "r.yaml:1: keys are texts, but 'on' is not; put it in quotes",
    "[a]: b": "r.yaml:1: keys are texts, but a list or mapping is not; put it in quotes",
    "a: !!python/name:os.system": "r.yaml:1: the tag '!!python/name:os.system' is not allowed in a recipe",
    "a: !!set {x, y}": "r.yaml:1: the tag '!!set' is not allowed in a recipe",
    "a: !mine x": "r.yaml:1: the tag '!mine' is not allowed in a recipe",
    "a: !!int x": "r.yaml:1: 'x' is not a value: ",
    "a: {<<: 3}": "r.yaml:1: not valid YAML: expected a mapping or list of mappings for merging",
    b"a: \xff\xfe": "r.yaml: not valid YAML: ",
    b"a: \x00": "r.yaml: not valid YAML: ",
}


@pytest.mark.parametrize("content", BROKEN, ids=lambda content: repr(content)[:40])
def test_broken_yaml_is_one_sentence_with_its_line(read, tmp_path, content):
    with pytest.raises(ConfigError) as caught:
        read(content)
    sentence = str(caught.value)
    assert sentence.startswith(f"{tmp_path}/{BROKEN[content]}") and "\n" not in sentence


def test_bundled_recipes_and_files_are_found(tmp_path, monkeypatch):
    assert find_recipe("default") == bundled_recipes()["default"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "default").write_text("seed: 2")
    assert str(find_recipe("default")) == "default"  # a file of that name comes first


def test_missing_recipes_name_what_exists(tmp_path):
    (tmp_path / "gsm8k.yaml").touch()
    with pytest.raises(
        ConfigError, match=r"^no recipe 'defalt': .* bundled recipes are default.*; did you mean 'default'"
    ):
        find_recipe("defalt")
    with pytest.raises(ConfigError, match=r"; did you mean '.*/gsm8k.yaml'"):
        find_recipe(f"{tmp_path}/gsm8.yaml")
    with pytest.raises(ConfigError, match="is a folder"):
        find_recipe(str(tmp_path))
    with pytest.raises(ConfigError, match="no recipe"):
        find_recipe(f"{tmp_path}/nowhere/x.yaml")


def test_unreadable_file(tmp_path):
    with pytest.raises(ConfigError, match=r"^cannot read recipe .*: No such file"):
        read_document(tmp_path / "gone.yaml")
