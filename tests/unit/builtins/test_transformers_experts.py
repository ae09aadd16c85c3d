"""A mixture of experts goes from trainer to engine under the checkpoint's names, which every engine knows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from areal.algorithms.sft import Sft
from areal.builtins.torch_backend.backend import TorchBackend
from areal.builtins.transformers_engine.engine import TransformersEngine
from areal.builtins.transformers_engine.options import TransformersEngineOptions
from areal.contracts.specs import BackendContext, EngineContext, ModelSpec, TrainingSpec
from areal.contracts.transfer import Transfer
from areal.testing.backend_fixtures import batch_of, sample_rows
from areal.testing.engine_fixtures import HostCpu
from areal.testing.models import family_model
from areal.testing.transfer import FOLDER_RESHARDER, FolderOptions, FolderResharder


@pytest.mark.parametrize("tied", [True, False])
async def test_the_engine_runs_with_the_trained_experts(tmp_path: Path, tied: bool) -> None:
    spec = ModelSpec(path=family_model(tmp_path / "model", "qwen3_moe", tie_word_embeddings=tied))
    training = TrainingSpec(learning_rate=1e-2)
    backend = TorchBackend(None, BackendContext(model=spec, training=training, accelerator=HostCpu(), seed=0))
    backend.start()
    context = EngineContext(model=spec, accelerator=HostCpu(), name="engine-0", seed=0)
    engine = TransformersEngine(TransformersEngineOptions(), context)
    target = await engine.start()
    backend.train_step(batch_of(sample_rows()), Sft())
    layout = backend.layout()
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in {spec.name for spec in layout.tensors}
    options = FolderOptions(folder=str(tmp_path / "published"))
    plan = FolderResharder(options, "").plan(layout, [target])
    stage = Transfer(phase="stage", version=1, resharder=FOLDER_RESHARDER, options=options, plan=plan)
    sent = backend.send(stage)
    assert (await engine.receive(stage)).checksums == sent.checksums
    await engine.receive(replace(stage, phase="commit"))
    assert engine._model is not None and backend._model is not None
    trained = dict(backend._model.module.named_parameters())
    for name, parameter in engine._model.module.named_parameters():
        assert torch.equal(parameter, trained[name]), name
    await engine.close()
