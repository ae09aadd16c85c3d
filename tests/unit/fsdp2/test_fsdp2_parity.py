"""Loss, logprobs and every gradient on four ranks are those of the single-device backend, whatever the mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp2_probe import Mixed
from safetensors import safe_open

from areal.algorithms.update.packing import micro_batches, pack
from areal.algorithms.update.tokens import token_batch
from areal.builtins.torch_backend.backend import TorchBackend
from areal.contracts.specs import BackendContext, ModelSpec, TrainerDevices, TrainingSpec
from areal.contracts.transfer import piece_name
from areal.errors import WorkerFailed
from areal.testing.backend_fixtures import batch_of, row, sample_rows
from areal.testing.engine_fixtures import HostCpu
from areal.testing.models import tiny_module
from areal.testing.ranks import Ranks, free_rendezvous
from areal_fsdp2.backend import Fsdp2Backend

pytestmark = pytest.mark.timeout(300)

RANKS = 4
# Token 0 pads: its embedding gets no gradient.
BATCH = batch_of([*sample_rows(num_prompts=5), row([1, 0, 0, 9], [0, 7, 63])], temperature=0.8)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    rendezvous = free_rendezvous()
    ranks = Ranks(RANKS, "fsdp2_probe:Probe", lambda rank: (rank, rendezvous))
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def context_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., BackendContext]:
    """Return the context of a model with eight heads and four key-value heads; the folder is written once."""
    paths: dict[str, str] = {}

    def context(arch: Any, world_size: int = RANKS, **training: Any) -> BackendContext:
        if arch not in paths:
            paths[arch] = str(tmp_path_factory.mktemp(arch))
            module = tiny_module(arch=arch, tied=arch == "qwen3", hidden=256)
            for parameter in module.parameters():
                # Logits of the size that trained models have, so that 1e-5 is more than their rounding.
                parameter.data.mul_(0.3 if parameter.ndim > 1 else 1.0)
            module.save_pretrained(paths[arch])
        return BackendContext(
            model=ModelSpec(path=paths[arch]),
            training=TrainingSpec(**{"micro_batch_tokens": 100, "grad_clip": 0.0, **training}),
            accelerator=HostCpu(),
            seed=0,
            devices=TrainerDevices(world_size=world_size, per_node=world_size),
        )

    return context


@pytest.fixture(scope="module")
def truth_of(context_of: Callable[..., BackendContext]) -> Callable[[str], tuple[Any, float, dict[str, Any]]]:
    """Return logprobs, loss and gradients of the single-device backend."""
    known: dict[str, Any] = {}

    def truth(arch: str) -> tuple[Any, float, dict[str, Any]]:
        if arch not in known:
            backend = TorchBackend(None, context_of(arch, world_size=1))
            backend.start()
            logprobs, loss = backend.logprobs(BATCH), 0.0
            totals = {"computed_tokens": BATCH.num_tokens, "computed_groups": 1}
            for chosen in micro_batches(BATCH.rows, 100):
                packed = pack(BATCH.rows, chosen, torch.device("cpu"))
                numbers, entropy = backend._started().token_numbers(packed, BATCH.temperature)
                value, _ = Mixed().loss(numbers, token_batch(BATCH, packed, numbers.detach(), entropy, **totals))
                value.backward()
                loss += float(value.detach())
            named = backend._started().module.named_parameters()
            known[arch] = logprobs, loss, {name: p.grad.numpy() for name, p in named if p.grad is not None}
        return known[arch]

    return truth


MESHES: dict[str, dict[str, int]] = {
    "dp4": {},
    "tp4": {"tp": 4},
    "tp2-sp2": {"tp": 2, "sp": 2},
    "tp2-pp2": {"pp": 2, "tp": 2},
    "replicate2-shard2": {"replicate": 2},
    "sp4": {"sp": 4},
    "dp2-tp2": {"tp": 2},
    "dp2-sp2": {"sp": 2},
    "dp2-pp2": {"pp": 2},
    "replicate2-pp2": {"pp": 2, "replicate": 2},
    "sp2-pp2": {"pp": 2, "sp": 2},
}
FAMILIES = {"qwen3": list(MESHES), "llama": list(MESHES)[:4], "qwen2": list(MESHES)[:4]}
"""Families differ in what is sliced and where layers are cut, so each sees every way to do so; the other meshes differ
in what they do to any family."""


@pytest.mark.parametrize(
    ("arch", "options"),
    [pytest.param(arch, MESHES[name], id=f"{arch}-{name}") for arch, names in FAMILIES.items() for name in names],
)
def test_loss_and_gradients_are_those_of_one_device(
    ranks: Ranks, context_of: Callable[..., BackendContext], truth_of: Callable[..., Any], arch: str, options: Any
) -> None:
    answers = ranks.call("gradients", options, context_of(arch), BATCH)
    check(answers, *truth_of(arch))


@pytest.mark.parametrize(
    ("options", "training"),
    [
        pytest.param({"tp": 2, "cpu_offload": True}, {}, id="offloaded"),
        pytest.param({"tp": 2, "sp": 2}, {"activation_checkpointing": True}, id="checkpointed"),
        pytest.param({"pp": 2, "cpu_offload": True}, {"activation_checkpointing": True}, id="stages"),
        pytest.param({}, {"micro_batch_tokens": 10_000}, id="one-micro-batch"),
        pytest.param({}, {"micro_batch_tokens": 1}, id="a-row-at-a-time"),
        pytest.param({"sp": 4}, {"micro_batch_tokens": 1}, id="rows-shorter-than-the-ranks"),
    ],
)
def test_how_memory_is_saved_changes_nothing(
    ranks: Ranks, context_of: Callable[..., BackendContext], truth_of: Callable[..., Any], options: Any, training: Any
) -> None:
    check(ranks.call("gradients", options, context_of("qwen3", **training), BATCH), *truth_of("qwen3"))


@pytest.mark.parametrize("options", [{}, {"replicate": 2}, {"tp": 2}, {"sp": 2}, {"pp": 2}], ids=str)
def test_pieces_are_the_owners_boxes_of_the_weights(
    ranks: Ranks, context_of: Callable[..., BackendContext], options: dict[str, Any]
) -> None:
    context = context_of("qwen3")
    answers = ranks.call("pieces", options, context)
    layout = answers[0][0]
    assert all(answer[0] == layout for answer in answers)
    assert (layout.num_ranks, layout.tensor_parallel) == (RANKS, options.get("tp", 1))
    with safe_open(Path(context.model.path) / "model.safetensors", framework="np") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    assert {spec.name: spec.shape for spec in layout.tensors} == {name: w.shape for name, w in weights.items()}
    sizes = dict.fromkeys(weights, 0)
    for rank, (_, sent) in enumerate(answers):
        for piece in layout.pieces[rank]:
            spec = layout.tensors[piece.tensor]
            assert (sent[piece_name(spec, piece)] == weights[spec.name][piece.box]).all()
            sizes[spec.name] += prod(piece.shape)
    assert sizes == {name: w.size for name, w in weights.items()}
    assert sum(bool(pieces) for pieces in layout.pieces) == (2 if "replicate" in options else RANKS)


def test_one_rank_is_a_trainer_too(context_of: Callable[..., BackendContext], truth_of: Callable[..., Any]) -> None:
    backend = Fsdp2Backend(None, context_of("qwen3", world_size=1))
    backend.start()
    for mine, theirs in zip(backend.logprobs(BATCH), truth_of("qwen3")[0], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)
    assert backend.layout().pieces == ()
    backend.close()
    backend.close()
    assert not torch.distributed.is_initialized()
    with pytest.raises(WorkerFailed, match="start"):
        backend.logprobs(BATCH)


def check(answers: list[Any], logprobs: Any, loss: float, gradients: dict[str, Any]) -> None:
    assert all(answer[:2] == answers[0][:2] and answer[3] == answers[0][3] for answer in answers)
    own_logprobs, statistics, found, norm = answers[0]
    for mine, theirs in zip(own_logprobs, logprobs, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)
    assert statistics["loss"] == pytest.approx(loss, abs=1e-5)
    assert set(found) == set(gradients)
    for name, gradient in gradients.items():
        assert abs(found[name] - gradient).max() <= 1e-5, name
    whole = torch.nn.utils.get_total_norm([torch.from_numpy(gradient) for gradient in gradients.values()])
    assert norm == pytest.approx(float(whole), rel=1e-5) and norm > 0.1
