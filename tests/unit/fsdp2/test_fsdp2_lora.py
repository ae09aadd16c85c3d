"""LoRA: the model's own weights stay, and what is trained is the same merged, alone, and after a restart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from fsdp2_trainers import BATCHES, Trainers, context_of
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal.algorithms.grpo import Grpo
from areal.algorithms.ppo import ValueLoss
from areal.contracts.specs import ModelSpec, TrainerDevices, TrainingSpec
from areal.contracts.transfer import Adapter
from areal.errors import ConfigError, WorkerFailed
from areal.testing.backend_fixtures import truth
from areal_fsdp2.backend import Fsdp2Backend
from areal_fsdp2.options import Fsdp2Options

pytestmark = pytest.mark.timeout(300)

LORA: dict[str, Any] = {"rank": 4, "alpha": 16, "target_modules": ("q_proj", "down_proj")}


def test_a_new_adapter_changes_nothing(two: Trainers, model_path: str) -> None:
    trainer = two.start(model_path, {"lora": LORA})
    own = load_file(f"{model_path}/model.safetensors")
    found = trainer.published()
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in own.items())


def test_only_the_target_modules_learn(two: Trainers, model_path: str) -> None:
    trainer = two.start(model_path, {"lora": LORA})
    trainer.steps(BATCHES[:2])
    own = load_file(f"{model_path}/model.safetensors")
    changed = {name for name, tensor in trainer.published().items() if not torch.equal(tensor, own[name])}
    assert changed == {name for name in own if "q_proj" in name or "down_proj" in name}


def test_the_update_does_not_depend_on_the_mesh(two: Trainers, four: Trainers, model_path: str) -> None:
    options = {"lora": LORA}
    single = Fsdp2Backend(Fsdp2Options(**options), context_of(model_path, 1))
    single.start()
    expected = [single.train_step(batch, Grpo()) for batch in BATCHES[:3]]
    single.close()
    for trainer in (two.start(model_path, options), four.start(model_path, {**options, "sp": 2, "replicate": 2})):
        for mine, theirs in zip(trainer.steps(BATCHES[:3]), expected, strict=True):
            assert mine == pytest.approx(theirs, abs=2e-5, rel=1e-4)


def test_the_saved_folders_are_what_is_trained(two: Trainers, model_path: str, tmp_path: Path) -> None:
    trainer = two.start(model_path, {"lora": LORA})
    trainer.steps(BATCHES[:2])
    own = trainer.do("logprobs", BATCHES[0])
    trainer.save(tmp_path)
    for mine, theirs in zip(own, truth(str(tmp_path / "model"), BATCHES[0]), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4, rel=0)
    merged = trainer.published()
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert merged.keys() == saved.keys() and all(torch.equal(merged[name], saved[name]) for name in saved)
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, local_files_only=True)
    by_peft = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).merge_and_unload()
    for name, parameter in by_peft.named_parameters():
        assert torch.allclose(parameter, saved[name], atol=1e-6), name


def test_an_adapter_alone_has_pefts_names(two: Trainers, model_path: str, tmp_path: Path) -> None:
    from areal_vllm.adapters import write_adapter

    trainer = two.start(model_path, {"lora": {**LORA, "publish": "adapter"}})
    trainer.steps(BATCHES[:2])
    adapter = trainer.do("layout").adapter
    assert adapter == Adapter(rank=4, alpha=16.0, target_modules=("q_proj", "down_proj"))
    weights = trainer.published()
    assert {name.rpartition(".layers.")[0] for name in weights} == {"base_model.model.model"}
    write_adapter(adapter, weights, tmp_path / "engine")
    trainer.save(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, local_files_only=True)
    served = PeftModel.from_pretrained(base, str(tmp_path / "engine")).merge_and_unload()
    saved = load_file(tmp_path / "model" / "model.safetensors")
    for name, parameter in served.named_parameters():
        assert torch.allclose(parameter, saved[name], atol=1e-6), name
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 16, model_path)


def test_a_run_goes_on_from_a_checkpoint_on_more_ranks(
    two: Trainers, four: Trainers, model_path: str, tmp_path: Path
) -> None:
    trainer = two.start(model_path, {"lora": LORA})
    trainer.steps(BATCHES[:1])
    trainer.do("freeze_reference")
    reference = trainer.do("reference_logprobs", BATCHES[0])
    trainer.steps(BATCHES[1:2])
    trainer.save(tmp_path)
    expected = trainer.steps(BATCHES[2:4])
    assert trainer.do("reference_logprobs", BATCHES[0]) == reference
    again = two.start(model_path, {"lora": LORA})
    again.do("load", str(tmp_path))
    assert again.steps(BATCHES[2:4]) == expected
    grown = four.start(model_path, {"lora": LORA, "replicate": 2})
    grown.do("load", str(tmp_path))
    for mine, theirs in zip(grown.steps(BATCHES[2:4]), expected, strict=True):
        assert mine == pytest.approx(theirs, abs=2e-5, rel=1e-4)
    # What is frozen is in the model's folder and not here again.
    frozen = sum(tensor.nbytes for tensor in load_file(f"{model_path}/model.safetensors").values())
    assert sum(path.stat().st_size for path in (tmp_path / "trainer").iterdir()) < frozen


@pytest.mark.parametrize(
    "then, now, said",
    [
        (
            LORA,
            {**LORA, "rank": 8},
            "q_proj.lora_A.weight of shape 4x128, which is 8x128 in the trainer of {model}, because the checkpoint has "
            "LoRA of rank 4 and the trainer LoRA of rank 8; set backend.lora back to rank 4 as in",
        ),
        (
            LORA,
            None,
            "has no tensor model.embed_tokens.weight, which the trainer of {model} has, because the checkpoint has "
            "LoRA of rank 4 on down_proj, q_proj and the trainer no LoRA; set backend.lora back to rank 4 and "
            "target_modules [down_proj, q_proj] as in",
        ),
        (
            LORA,
            {**LORA, "alpha": 8},
            "has LoRA factors for alpha 16 and the trainer's is 8; set backend.lora back to alpha",
        ),
        (None, LORA, "the checkpoint has no LoRA and the trainer LoRA of rank 4 on down_proj, q_proj; leave backend"),
    ],
)
def test_changed_settings_are_named_on_resume(
    two: Trainers, model_path: str, tmp_path: Path, then: Any, now: Any, said: str
) -> None:
    two.start(model_path, {"lora": then}).save(tmp_path)
    with pytest.raises(ConfigError) as caught:
        two.start(model_path, {"lora": now}).do("load", str(tmp_path))
    assert str(caught.value).startswith(f"the checkpoint {str(tmp_path)!r} has ")
    assert said.format(model=repr(model_path)) in str(caught.value)
    assert str(caught.value).endswith("in the checkpoint, or start a new run") and "\n" not in str(caught.value)


def test_a_critics_head_is_trained_too(two: Trainers, model_path: str, tmp_path: Path) -> None:
    critic = two.start(model_path, {"lora": LORA}, role="critic")
    rows = [replace(r, values=(0.0,) * len(r.token_ids), returns=r.advantages) for r in BATCHES[0].rows]
    judged = replace(BATCHES[0], rows=tuple(rows))
    losses = [critic.do("train_step", judged, ValueLoss(None))["loss"] for _ in range(3)]
    assert losses[2] < losses[0]
    critic.save(tmp_path)
    head = load_file(tmp_path / "model" / "model.safetensors")["score.weight"]
    assert head.abs().max() > 0
    again = two.start(model_path, {"lora": LORA}, role="critic")
    again.do("load", str(tmp_path))
    assert again.do("values", judged) == critic.do("values", judged)


def test_a_target_that_the_model_has_not_is_refused(two: Trainers, model_path: str) -> None:
    with pytest.raises(WorkerFailed, match=r"'qproj' .* q_proj, up_proj, v_proj; did you mean 'q_proj'\?") as caught:
        two.start(model_path, {"lora": {"target_modules": ("qproj",)}})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options, said",
    [({"tp": 2}, "not with tp 2; use tp 1"), ({"tp": 2, "pp": 2}, "not with tp 2, pp 2; use tp 1 and pp 1"), ({}, "")],
)
def test_meshes_that_lora_cannot_have_are_refused(options: dict[str, Any], said: str) -> None:
    devices = TrainerDevices(world_size=4, per_node=4)
    problem = Fsdp2Options(lora=LORA, **options).problem(devices, ModelSpec(), TrainingSpec())
    assert said in problem and bool(problem) == bool(said)


def test_a_missing_library_is_said_when_the_recipe_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peft is not None
    monkeypatch.setattr("areal_fsdp2.options.find_spec", lambda name: None)
    problem = Fsdp2Options(lora=LORA).problem(TrainerDevices(world_size=2), ModelSpec(), TrainingSpec())
    assert problem.endswith("pip install 'areal-fsdp2[lora]'")
