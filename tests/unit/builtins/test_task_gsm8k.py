"""Word problems: reading them, asking them, scoring the replies."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from areal.builtins.tasks.answers import after_mark, in_tag, last_number
from areal.builtins.tasks.gsm8k import Gsm8k, Gsm8kOptions, read_dataset, read_jsonl
from areal.contracts.specs import EnvironmentContext
from areal.errors import ConfigError, MissingLibrary
from areal.testing.environment import ScriptedClient

CONTEXT = EnvironmentContext(name="math", seed=1)
DATA = Path(__file__).parents[2] / "data" / "gsm8k_64.jsonl"
ROW = {"question": "What is 6 times 7?", "answer": "6 * 7 = 42\n#### 42"}


def make(data: Path, **options: Any) -> Gsm8k:
    return Gsm8k(Gsm8kOptions(data=str(data), **options), CONTEXT)


def write(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_the_bundled_file_has_64_different_problems():
    rows = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == len({row["question"] for row in rows}) == 64
    for row in rows:
        answer = after_mark(row["answer"])
        assert answer is not None
        float(answer)


def test_a_single_file_is_split_without_overlap():
    environment = make(DATA)
    train, test = environment.prompts("train"), environment.prompts("test")
    assert (len(train), len(test)) == (58, 6)
    prompt = train[0]
    assert prompt.messages[0]["content"].endswith(Gsm8kOptions().suffix)
    assert prompt.metadata == {"reference": "216"} and prompt.answer.endswith("#### 216")


def test_a_folder_has_a_file_for_each_split(tmp_path: Path):
    write(tmp_path / "train.jsonl", ROW, "", ROW, ROW)
    write(tmp_path / "valid.jsonl", {**ROW, "extra": 1})
    environment = make(tmp_path, test_split="valid", suffix="!")
    assert (len(environment.prompts("train")), len(environment.prompts("test"))) == (3, 1)
    assert environment.prompts("test")[0].messages == ({"role": "user", "content": "What is 6 times 7?!"},)


def test_a_name_goes_to_the_datasets_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    repository = tmp_path / "mine"
    repository.mkdir()
    for split, num_rows in (("train", 5), ("test", 2)):
        rows = datasets.Dataset.from_list([ROW] * num_rows)
        rows.to_parquet(repository / f"{split}-00000-of-00001.parquet")
    options = Gsm8kOptions(data=str(repository))
    assert [len(read_dataset(options, split)) for split in ("train", "test")] == [5, 2]
    with pytest.raises(ConfigError, match="cannot load split 'nope' of dataset"):
        read_dataset(options, "nope")


def test_a_dataset_that_cannot_be_reached_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    datasets = pytest.importorskip("datasets")

    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ConfigError, match="dataset 'openai/gsm8k': no route to host; option 'data'"):
        Gsm8k(Gsm8kOptions(), CONTEXT)


@pytest.mark.parametrize("library", ["datasets", "math_verify"])
def test_a_missing_library_is_named_with_its_install_command(library: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    data = "somebody/something" if library == "datasets" else str(DATA)
    with pytest.raises(MissingLibrary, match=r"not installed; install it with: pip install 'areal-core\[tasks\]'"):
        Gsm8k(Gsm8kOptions(data=data), CONTEXT)


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([], "is empty"),
        (["", "  "], "is empty"),
        ([ROW], "has one problem"),
        ([ROW, "{oops"], r"line 2: not valid JSON"),
        ([ROW, "", "7"], r"line 3: expected an object .* found int"),
        ([ROW, {"question": "?"}], r"line 2: field 'answer' must be a text .* the row has: question"),
        ([{"problem": "?", "answer": "#### 1"}, ROW], r"line 1: field 'question'"),
        ([ROW, {**ROW, "answer": 42}], r"line 2: field 'answer' must be a text"),
        ([ROW, {**ROW, "answer": "42"}], r"line 2: field 'answer' must end with the final answer after '####'"),
        ([ROW, {**ROW, "answer": "6 * 7 = 42 ####"}], r"line 2: field 'answer' must end with"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path: Path, lines: list[Any], complaint: str):
    path = write(tmp_path / "bad.jsonl", *lines)
    with pytest.raises(ConfigError, match=complaint) as refusal:
        make(path)
    assert str(path) in str(refusal.value) and "\n" not in str(refusal.value)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"absent\.jsonl: No such file"):
        make(tmp_path / "absent.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        make(tmp_path / "binary.jsonl")
    with pytest.raises(ConfigError, match=r"train\.jsonl: No such file"):
        make(tmp_path)


async def test_replies_are_scored_by_their_final_answer():
    pytest.importorskip("math_verify")
    environment = make(DATA)
    prompt = environment.prompts("train")[0]  # 216
    rewards = {
        "First 12, then\n#### 216": 1,
        "216": 1,
        "#### $216.00": 1,
        "<answer>216</answer> not 5": 1,
        "It is \\boxed{216}.": 1,
        "216 it is not; #### 215": 0,
        "#### 216 #### 9": 0,
        "two hundred": 0,
        "": 0,
    }
    for text, reward in rewards.items():
        outcome = await environment.episode(prompt, ScriptedClient(text))
        assert (text, outcome.status, outcome.reward) == (text, "ok", reward)
        assert outcome.metrics == {"accuracy": reward}


async def test_an_answer_that_never_finishes_is_a_timeout_and_not_a_zero():
    pytest.importorskip("math_verify")
    environment = make(DATA, timeout_s=1.0)
    prompt = environment.prompts("train")[0]
    assert (await environment.episode(prompt, ScriptedClient("#### 9**9**9**9"))).status == "timeout"
    assert (await environment.episode(prompt, ScriptedClient("#### 216"))).reward == 1


async def test_a_reference_without_a_number_is_an_error(tmp_path: Path):
    pytest.importorskip("math_verify")
    environment = make(write(tmp_path / "words.jsonl", *[{**ROW, "answer": "#### forty-two!"}] * 2))
    outcome = await environment.episode(environment.prompts("train")[0], ScriptedClient("42"))
    assert outcome.status == "error" and "finds no number in the reference" in outcome.detail


def test_finding_answers():
    assert after_mark("a #### 1 #### 2 ") == "2" and after_mark("a") is None
    assert in_tag("<a>1</a><a>\n2 </a>", "a") == "2" and in_tag("<a>1", "a") is None
    assert last_number("3 + 4 = 1,234.5.") == "1234.5" and last_number("5 - 9 = -4") == "-4"
    assert last_number("none") is None


@pytest.mark.parametrize("options", [{"timeout_s": 0}, {"test_share": 1}, {"file": "x"}])
def test_bad_options_are_refused(options: dict[str, Any]):
    with pytest.raises(ValueError, match="validation error"):
        Gsm8kOptions(**options)


def test_marks_and_separators_of_other_editors(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    lines = ['{"question": "one\u2028line", "answer": "#### 1"}', '{"question": "two", "answer": "#### 2"}', ""]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    rows = [dict(row) for row in read_jsonl(path)]
    assert [row["question"] for row in rows] == ["one\u2028line", "two"]
