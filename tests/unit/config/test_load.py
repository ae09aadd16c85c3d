"""Reading recipes: what loads, what the command line changes, and what each refusal says."""

import math
from pathlib import Path

import pytest
from pydantic import ConfigDict, Field, field_validator

from areal.config import load_recipe, split_arguments
from areal.contracts.backend import DistributedOptions
from areal.contracts.component import Component
from areal.contracts.options import Options
from areal.contracts.specs import AmpSpec, ModelSpec, TrainerDevices, TrainingSpec
from areal.errors import ConfigError, UnknownComponent

BLOCKS = {
    "model": "model:      {name: Qwen3-0.6B, path: /models/qwen3-0.6b-npu}"
    "        # for MoE also: type: moe, num_experts: 128, top_k: 4",
    "resources": "resources:  {train: {num_gpus: 1, parallel: dp}, infer: {num_gpus: 1, parallel: dp}}"
    "   # or num_nodes, gpus_per_node; dp | tp | pp",
    "training": "training:   {batch_size: 32, learning_rate: 1e-5, max_steps: 10000,"
    " amp: {enabled: true, dtype: bf16, loss_scale: dynamic}}",
    "environments": "environments: [{name: math, type: gsm8k, weight: 0.6},"
    " {name: code, type: humaneval, weight: 0.4}]",
    "parallel": "parallel:   {expert: dp, other: tp}",
}


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "recipe.yaml") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


def refusal(source, overrides=(), **rest) -> str:
    """Return the sentence of the refusal, which is one line."""
    with pytest.raises(ConfigError) as caught:
        load_recipe(source, overrides, **rest)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


class EngineOptions(Options):
    max_batch: int = Field(default=4, ge=1)
    ratio: float = 0.5
    mode: str = "keep"

    @field_validator("mode")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in ("keep", "recompute"):
            raise ValueError(f"there is no mode {value!r}")
        return value


class OpenOptions(Options):
    model_config = ConfigDict(extra="allow")


class SpreadOptions(DistributedOptions):
    tp: int = 1
    tpx: int = 1

    def problem(self, devices: TrainerDevices, model: ModelSpec, training: TrainingSpec) -> str:
        return f"tp {self.tp} is not {devices.world_size}" if self.tp != devices.world_size else ""


def resolve(kind: str, name: str) -> Component | None:
    if name == "spread":
        return Component(name=name, factory="x:Y", options=f"{__name__}:SpreadOptions")
    if kind == "engine" and name == "mine":
        return Component(name=name, factory="x:Y", options=f"{__name__}:EngineOptions")
    if name == "open":
        return Component(name=name, factory="x:Y", options=f"{__name__}:OpenOptions")
    if name == "plain":
        return Component(name=name, factory="x:Y")
    if name == "nobody":
        raise UnknownComponent(f"no {kind} named {name!r}")
    return None


# What users were shown.


@pytest.mark.parametrize("block", BLOCKS)
def test_each_printed_block_loads_alone(write, block):
    config = load_recipe(write(BLOCKS[block]))
    assert getattr(config, block) is not None


def test_all_printed_blocks_load_together(write):
    config = load_recipe(write("\n".join(BLOCKS.values())))
    assert config.model.path == "/models/qwen3-0.6b-npu"
    assert config.training.learning_rate == 1e-5 and isinstance(config.training.learning_rate, float)
    assert config.training.amp == AmpSpec(enabled=True, dtype="bf16", loss_scale="dynamic")
    assert [(e.name, e.type, e.weight) for e in config.environments] == [
        ("math", "gsm8k", 0.6),
        ("code", "humaneval", 0.4),
    ]
    assert (config.parallel.expert, config.parallel.other) == ("dp", "tp")
    assert config.resources.infer.total == 1


def test_printed_moe_variant_loads(write):
    text = BLOCKS["model"].replace("npu}", "npu, type: moe, num_experts: 128, top_k: 4}")
    config = load_recipe(write(text + "\n" + BLOCKS["parallel"]))
    assert (config.model.type, config.model.num_experts, config.model.top_k) == ("moe", 128, 4)


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "1.0e-5", "+1e-5", "'1e-5'"])
def test_exponents_arrive_as_numbers(write, text):
    assert load_recipe(write(f"training: {{learning_rate: {text}}}")).training.learning_rate == 1e-5


def test_exponents_stay_texts_where_texts_are_wanted(write):
    config = load_recipe(write("name: 1e-5\nmodel: {name: 2e3}\nengine: {name: x, tag: 1e-3}"))
    assert (config.name, config.model.name, config.engine.options) == ("1e-5", "2e3", {"tag": "1e-3"})


def test_exponents_are_read_for_whole_numbers_too(write):
    config = load_recipe(write("training: {max_steps: 1e4}"), ["sampling.stop_token_ids=[1e1, 2]"])
    assert config.training.max_steps == 10000 and isinstance(config.training.max_steps, int)
    assert config.sampling.stop_token_ids == (10, 2)


def test_numbers_of_every_kind_of_loss_scale(write):
    config = load_recipe(write("training: {amp: {enabled: true, dtype: fp16, loss_scale: 1e3}}"))
    assert config.training.amp.loss_scale == 1000.0


def test_empty_file_is_all_defaults(write):
    for text in ("", "# nothing\n", "{}", "---\n"):
        config = load_recipe(write(text))
        assert config.algorithm.name == "grpo" and config.environments[0].type == "reverse_digits"
        assert [tracker.name for tracker in config.trackers] == ["jsonl", "tensorboard"]


def test_no_source_is_the_bundled_default():
    assert load_recipe() == load_recipe("default")
    assert load_recipe().name == "reverse_digits"


def test_trackers_are_names_or_blocks(write):
    config = load_recipe(write("trackers: [jsonl, {name: wandb, project: p}]"))
    assert [(tracker.name, tracker.options) for tracker in config.trackers] == [
        ("jsonl", {}),
        ("wandb", {"project": "p"}),
    ]


# Refusals of files.

FILE_REFUSALS = {
    "training:\n  learning_rat: 1": (
        "recipe.yaml:2: unknown key 'learning_rat' in 'training'; did you mean 'learning_rate'?"
    ),
    "seed: 2\nlearning_rate: 1": "recipe.yaml:2: unknown key 'learning_rate'; it belongs in 'training'",
    "training: {amp:\n  {enabled: true,\n  dtyp: bf16}}": (
        "recipe.yaml:3: unknown key 'dtyp' in 'training.amp'; did you mean 'dtype'?"
    ),
    "sampling: {max_token: 3}": "recipe.yaml:1: unknown key 'max_token' in 'sampling'; did you mean 'max_new_tokens'?",
    "staleness:\n  zzz: 1": "recipe.yaml:2: unknown key 'zzz' in 'staleness'; known keys: max, on_excess, order",
    "environments:\n- {type: a}\n-\n  name: b": "recipe.yaml:4: 'environments.1.type' is missing",
    "training:\n  batch_size: many": "recipe.yaml:2: 'training.batch_size' is 'many', but must be a whole number",
    "training:\n  batch_size: 0": "recipe.yaml:2: 'training.batch_size' is 0, but must be greater than 0",
    "training:\n  batch_size: 1.5": "recipe.yaml:2: 'training.batch_size' is 1.5, but must be a whole number",
    "training:\n  batch_size: 1.5e0x": "recipe.yaml:2: 'training.batch_size' is '1.5e0x', but must be a whole number",
    "training:\n  batch_size: yes": "recipe.yaml:2: 'training.batch_size' is true, but must be a number",
    "training:\n  learning_rate: .nan": "recipe.yaml:2: 'training.learning_rate' is nan, but must be a finite number",
    "training:\n  learning_rate: -.inf": "recipe.yaml:2: 'training.learning_rate' is -inf, but must be a finite number",
    "training:\n  learning_rate: -1e-5": (
        "recipe.yaml:2: 'training.learning_rate' is '-1e-5', but must be greater than 0"
    ),
    "training:\n  betas: [0.9, 1.0]": "recipe.yaml:2: 'training.betas.1' is 1.0, but must be less than 1",
    "training:\n  betas: [0.9]": "recipe.yaml:2: 'training.betas.1' is missing",
    "training:\n  betas: [0.9, 0.9, 0.9]": (
        "recipe.yaml:2: 'training.betas' is a list of 3, but must be a list of at most 2"
    ),
    "training:\n  betas: 0.9": "recipe.yaml:2: 'training.betas' is 0.9, but must be a list",
    "training:\n  schedule: lineer": (
        "recipe.yaml:2: 'training.schedule' is 'lineer', but must be 'constant', 'linear' or 'cosine'; "
        "did you mean 'linear'?"
    ),
    "training:\n  amp: {loss_scale: high}": (
        "recipe.yaml:2: 'training.amp.loss_scale' is 'high', but must be 'dynamic' or a number"
    ),
    "training:\n  amp: {enabled: 3}": "recipe.yaml:2: 'training.amp.enabled' is 3, but must be true or false",
    "training:": "recipe.yaml:1: 'training' has no value; give it one, or remove the key",
    "training: 3": "recipe.yaml:1: 'training' is 3, but must be a mapping of keys to values",
    "engine: vllm": "recipe.yaml:1: 'engine' is 'vllm', but must be a mapping of keys to values; write {name: vllm}",
    "name: 7": "recipe.yaml:1: 'name' is 7, but must be a text, in quotes",
    "name: [a]": "recipe.yaml:1: 'name' is a list of 1, but must be a text, in quotes",
    "name: {a: 1}": "recipe.yaml:1: 'name' is a mapping, but must be a text, in quotes",
    "seed: -1\nstaleness: {max: -1}": (
        "recipe.yaml:1: 'seed' is -1, but must be greater than or equal to 0 (and 1 more)"
    ),
    "staleness: {max: -1}": "recipe.yaml:1: 'staleness.max' is -1, but must be greater than or equal to 0",
    "environments:\n- {type: a,\n   weight: -1}": (
        "recipe.yaml:3: 'environments.0.weight' is -1, but must be greater than or equal to 0"
    ),
}


@pytest.mark.parametrize("text", FILE_REFUSALS, ids=repr)
def test_file_refusals_name_line_key_and_remedy(write, text):
    path = write(text)
    assert refusal(path) == str(Path(path).parent / FILE_REFUSALS[text])


def test_long_values_are_shortened(write):
    sentence = refusal(write(f"seed: {'x' * 500}"))
    assert len(sentence) < 200 + len(write("")) and "xxx..." in sentence


# Overrides.


def test_overrides_reach_every_depth(write):
    config = load_recipe(
        write("environments: [{type: a, weight: 0.2}, {type: b}]"),
        [
            "seed=7",
            "training.learning_rate=3e-4",
            "training.amp={enabled: true}",
            "environments.0.weight=0.5",
            "environments.1.num_digits=5",
            "sampling.stop_token_ids=[1, 2]",
            "engine.cache.blocks=12",
            "model.name=",
            "runs_dir=a=b",
        ],
    )
    assert config.seed == 7 and config.training.learning_rate == 3e-4 and config.training.amp.enabled is True
    assert config.environments[0].weight == 0.5 and config.environments[1].options == {"num_digits": 5}
    assert config.sampling.stop_token_ids == (1, 2)
    assert config.engine.options == {"cache": {"blocks": 12}}
    assert config.model.name == "" and config.runs_dir == "a=b"


def test_later_overrides_win(write):
    config = load_recipe(write(""), ["training={batch_size: 8, max_steps: 3}", "training.batch_size=4"])
    assert (config.training.batch_size, config.training.max_steps) == (4, 3)


def test_list_positions_start_from_the_defaults(write):
    config = load_recipe(write(""), ["environments.0.weight=2", "training.betas.1=0.99", "trackers.1=wandb"])
    assert config.environments[0].type == "reverse_digits" and config.environments[0].weight == 2
    assert config.training.betas == (0.9, 0.99)
    assert [tracker.name for tracker in config.trackers] == ["jsonl", "wandb"]


OVERRIDE_REFUSALS = {
    "training.learning_rat=1": "unknown key 'learning_rat' in 'training'; did you mean 'learning_rate'?",
    "x.y.z=1": "unknown key 'x'; known keys: algorithm, backend, ",
    "training.batch_size=0": "'training.batch_size' is 0, but must be greater than 0",
    "seed=": "'seed' is '', but must be a whole number",
    "training.amp={dtyp: bf16}": "unknown key 'dtyp' in 'training.amp'; did you mean 'dtype'?",
    "trackers.5=wandb": "'trackers' has 2 entries, counted from 0, so there is no 5",
    "environments.weight=1": "'environments' is a list; give a position, as in environments.0.weight",
    "training.0=1": "'training' is a mapping, so there is no '0' in it",
    "0=1": "the recipe is a mapping, so there is no '0' in it",
    "seed.x=1": "'seed' is 3, so there is no 'x' in it",
    "name=[": "not valid YAML: ",
    "name=a: b: c": "not valid YAML: ",
    "name=!!python/object:os.system x": "the tag '!!python/object:os.system' is not allowed in a recipe",
    "environments.0.weight=0": "every environment has weight 0",
}


@pytest.mark.parametrize("argument", OVERRIDE_REFUSALS)
def test_override_refusals_say_that_they_came_from_the_command_line(write, argument):
    path = write("seed: 3\ntraining: {max_steps: 9}\nenvironments: [{type: a}]\ntrackers: [jsonl, tensorboard]")
    assert refusal(path, [argument]).startswith(f"command line, {argument}: {OVERRIDE_REFUSALS[argument]}")


@pytest.mark.parametrize("argument", ["seed", "=3", "training..x=1", ".=1"])
def test_what_is_no_override(argument):
    assert refusal(None, [argument]) == f"{argument!r} is not of the form key.sub=value"


def test_arguments_are_a_recipe_and_overrides():
    assert split_arguments([]) == (None, [])
    assert split_arguments(["a.yaml", "b=1"]) == ("a.yaml", ["b=1"])
    assert split_arguments(["b=1", "c=2"]) == (None, ["b=1", "c=2"])


# Selections.

SELECTING = (
    "engine: {name: transformers, replicas: 2, python: /x, kv: keep}\nreshard: {name: disk, folder: f}\ndevice: npu"
)


def test_another_component_starts_without_the_old_options(write):
    config = load_recipe(write(SELECTING), selections={"engine": "vllm", "reshard": "xccl", "device": "cpu"})
    assert (config.engine.name, config.engine.replicas, config.engine.python) == ("vllm", 2, "")
    assert config.engine.options == {} and config.reshard.options == {}
    assert (config.reshard.name, config.device, config.cluster.name) == ("xccl", "cpu", "auto")


def test_the_same_component_keeps_its_options(write):
    config = load_recipe(write(SELECTING), selections={"engine": "transformers", "backend": "torch"})
    assert config.engine.options == {"kv": "keep"} and config.engine.python == "/x"
    unnamed = load_recipe(write("engine: {kv: keep}"), selections={"engine": "transformers"})
    assert unnamed.engine.options == {"kv": "keep"}


def test_overrides_come_after_selections(write):
    config = load_recipe(write(SELECTING), ["engine.kv=drop"], {"engine": "vllm"})
    assert config.engine.options == {"kv": "drop"}


def test_unknown_selection(write):
    assert refusal(None, selections={"engin": "x"}).endswith("did you mean 'engine'?")


# Components' own options.


def test_owners_validate_their_options_with_file_and_line(write):
    path = write("engine:\n  name: mine\n  max_bach: 3")
    assert refusal(path, resolve=resolve) == f"{path}:3: unknown key 'max_bach' in 'engine'; did you mean 'max_batch'?"
    path = write("engine:\n  name: mine\n  replica: 3")
    assert refusal(path, resolve=resolve) == f"{path}:3: unknown key 'replica' in 'engine'; did you mean 'replicas'?"
    path = write("engine:\n  name: mine\n  temperature: 3")
    assert refusal(path, resolve=resolve).endswith("unknown key 'temperature' in 'engine'; it belongs in 'sampling'")
    path = write("engine:\n  name: mine\n  max_batch: 0")
    assert refusal(path, resolve=resolve) == (
        f"{path}:3: 'engine.max_batch' is 0, but must be greater than or equal to 1"
    )
    path = write("engine:\n  name: mine\n  max_batch: true")
    assert refusal(path, resolve=resolve) == f"{path}:3: 'engine.max_batch' is true, but must be a number"
    path = write("engine:\n  name: mine\n  mode: x")
    assert refusal(path, resolve=resolve) == f"{path}:3: 'engine.mode': there is no mode 'x'"


def test_options_of_list_entries_and_of_the_command_line(write):
    path = write("environments:\n- type: a\n- type: plain\n  digits: 3")
    assert refusal(path, resolve=resolve).startswith(f"{path}:4: unknown key 'digits' in 'environments.1'; known keys:")
    sentence = refusal(write(""), ["engine.max_bach=3"], selections={"engine": "mine"}, resolve=resolve)
    assert sentence.startswith("command line, engine.max_bach=3: unknown key 'max_bach' in 'engine'")


def test_valid_options_load_and_exponents_reach_their_owner(write):
    config = load_recipe(write("engine: {name: mine, max_batch: 1e2, ratio: 1e-1}"), resolve=resolve)
    assert config.engine.options["max_batch"] == 100 and isinstance(config.engine.options["max_batch"], int)
    assert math.isclose(EngineOptions.model_validate(config.engine.options).ratio, 0.1)


def test_what_a_backend_cannot_spread_is_refused_where_it_stands(write):
    train = "resources: {train: {num_gpus: 2}}\n"
    path = write(f"{train}backend:\n  name: spread\n  tpx: 4\n  tp: 3")
    assert refusal(path, resolve=resolve) == f"{path}:5: backend 'spread': tp 3 is not 2"
    path = write(f"{train}backend:\n  name: spread")
    assert refusal(path, resolve=resolve) == f"{path}:3: backend 'spread': tp 1 is not 2"
    said = refusal(path, ["backend.tp=4"], resolve=resolve)
    assert said == "command line, backend.tp=4: backend 'spread': tp 4 is not 2"
    assert load_recipe(path, ["backend.tp=2"], resolve=resolve).backend.options == {"tp": 2}


def test_open_options_take_anything(write):
    options = {"x": True, "y": [1, {"z": None}]}
    config = load_recipe(write("backend: {name: open, x: true, y: [1, {z: null}]}"), resolve=resolve)
    assert config.backend.options == options


def test_unknown_component_keeps_its_class_and_gains_its_place(write):
    for text, line in (("engine:\n  name: nobody", 2), ("environments:\n- {type: a}\n- {type: nobody}", 3)):
        path = write(text)
        with pytest.raises(UnknownComponent, match=rf"recipe\.yaml:{line}: no \w+ named 'nobody'"):
            load_recipe(path, resolve=resolve)
    with pytest.raises(UnknownComponent, match=r"^command line, --device nobody: no accelerator named 'nobody'"):
        load_recipe(write(""), selections={"device": "nobody"}, resolve=resolve)
