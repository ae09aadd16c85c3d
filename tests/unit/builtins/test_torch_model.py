"""Packed rows give the logprobs and the gradients of padded batches, for every kind of model that is accepted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM

from areal.algorithms.update.packing import micro_batches, pack
from areal.builtins.torch_backend.model import PolicyModel
from areal.contracts.messages import Row
from areal.contracts.specs import AmpSpec, BackendContext, ModelSpec, TrainingSpec
from areal.errors import WorkerFailed
from areal.testing.engine_fixtures import HostCpu
from areal.testing.models import FAMILIES, family_model, tiny_model

CPU = torch.device("cpu")
MANY = 1 << 24
TEMPERATURE = 0.8


def context(path: str, **training: Any) -> BackendContext:
    return BackendContext(model=ModelSpec(path=path), training=TrainingSpec(**training), accelerator=HostCpu(), seed=0)


def some_rows(seed: int = 0) -> list[Row]:
    """Return rows of 2 to 30 tokens, two prompts with several answers among them, and gaps in the masks."""
    generator = torch.Generator().manual_seed(seed)

    def draw(size: int, high: int = 64) -> list[int]:
        return torch.randint(high, (size,), generator=generator).tolist()

    prompts = [draw(4), draw(9)]
    rows = []
    for number in range(14):
        prompt = [*prompts[number % 2]] if number < 10 else draw(1)
        answer = draw(1 + 2 * number)
        mask = [False] * len(prompt) + [bool(x) for x in draw(len(answer) - 1, 3)] + [number % 3 > 0]
        mask[len(prompt)] = True
        length = len(mask)
        rows.append(
            Row(
                token_ids=(*prompt, *answer),
                loss_mask=tuple(mask),
                logprobs=(0.0,) * length,
                versions=(0,) * length,
                advantages=(1.0,) * length,
            )
        )
    return rows


def padded(module: Any, rows: list[Row]) -> tuple[Tensor, Tensor]:
    """Return logprobs and entropies of the trained tokens, row after row, from one padded batch."""
    ids = pad_sequence([torch.tensor(row.token_ids) for row in rows], batch_first=True)
    present = pad_sequence([torch.ones(len(row.token_ids)) for row in rows], batch_first=True)
    mask = pad_sequence([torch.tensor(row.loss_mask) for row in rows], batch_first=True)[:, 1:]
    logits = module(input_ids=ids, attention_mask=present, use_cache=False).logits[:, :-1].float() / TEMPERATURE
    table = logits.log_softmax(-1)
    logprobs = table.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return logprobs[mask], -(table.exp() * table).sum(-1)[mask]


def weighted(logprobs: Tensor, entropies: Tensor) -> Tensor:
    """Return a number that depends on every token and is a sum over tokens."""
    weights = torch.linspace(-1, 1, len(logprobs))
    return (weights * logprobs + 0.3 * entropies).sum() / len(logprobs)


def in_packed_order(rows: list[Row]) -> list[Row]:
    (chosen,) = micro_batches(rows, MANY)
    return [rows[i] for i in chosen]


def check(path: str, amp: AmpSpec | None = None, **training: Any) -> None:
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model = PolicyModel(context(path, amp=amp or AmpSpec(), **training), CPU)
    rows = in_packed_order(some_rows())
    logprobs, entropies = model.token_numbers(pack(rows, range(len(rows)), CPU), TEMPERATURE)
    expected = padded(reference, rows)
    torch.testing.assert_close((logprobs, entropies), expected, atol=2e-5, rtol=1e-5)
    weighted(logprobs, entropies).backward()
    weighted(*expected).backward()
    for (name, ours), theirs in zip(model.module.named_parameters(), reference.parameters(), strict=True):
        wanted = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        torch.testing.assert_close(
            torch.zeros_like(ours) if ours.grad is None else ours.grad, wanted, atol=1e-5, rtol=1e-4, msg=name
        )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_gradients_are_those_of_a_padded_batch(arch: Any, tied: bool, tmp_path: Path) -> None:
    check(tiny_model(tmp_path, arch=arch, tied=tied))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: Any) -> PolicyModel:
    return PolicyModel(context(tiny_model(tmp_path_factory.mktemp("model"))), CPU)


def gradient(model: PolicyModel, rows: list[Row], budget: int) -> list[Tensor]:
    """Return the gradient of a batch's loss, collected over micro-batches; each row has a weight of its own."""
    model.module.zero_grad()
    for chosen in micro_batches(rows, budget):
        packed = pack(rows, chosen, CPU)
        logprobs, entropies = model.token_numbers(packed, TEMPERATURE)
        weights = torch.tensor([sum(rows[i].token_ids) % 7 - 3.0 for i in packed.rows])[packed.sequence]
        ((weights * logprobs + entropies).sum() / 1000).backward()
    return [parameter.grad.clone() for parameter in model.module.parameters() if parameter.grad is not None]


@given(st.integers(1, 300), st.randoms(use_true_random=False), st.integers(0, 3))
@settings(max_examples=15, deadline=None)
def test_the_gradient_does_not_depend_on_the_packing(qwen3: PolicyModel, budget: int, random: Any, seed: int) -> None:
    rows = some_rows(seed)
    expected = gradient(qwen3, rows, MANY)
    random.shuffle(rows)
    torch.testing.assert_close(gradient(qwen3, rows, budget), expected, atol=1e-6, rtol=1e-5)


def test_learnt_positions_restart_in_every_row(tmp_path: Path) -> None:
    check(tiny_model(tmp_path, arch="gpt2"))


@pytest.mark.parametrize("arch", list(FAMILIES))
def test_windows_scales_caps_and_experts(arch: str, tmp_path: Path) -> None:
    check(family_model(tmp_path, arch))


def test_activation_checkpointing_changes_nothing(tmp_path: Path) -> None:
    check(tiny_model(tmp_path), activation_checkpointing=True)


def kept_bytes(path: str, checkpointing: bool) -> int:
    """Return the bytes that the forward pass keeps for the backward pass."""
    model = PolicyModel(context(path, activation_checkpointing=checkpointing), CPU)
    kept = {id(parameter): 0 for parameter in model.module.parameters()}

    def note(tensor: Tensor) -> Tensor:
        kept.setdefault(id(tensor), tensor.nbytes)
        return tensor

    rows = in_packed_order(some_rows())
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model.token_numbers(pack(rows, range(len(rows)), CPU), 1.0)
    return sum(kept.values())


def test_activation_checkpointing_keeps_less(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, layers=4)
    assert kept_bytes(path, checkpointing=True) < 0.5 * kept_bytes(path, checkpointing=False)


def test_dropout_is_off_in_training_mode(tmp_path: Path) -> None:
    path = family_model(tmp_path, "llama", attention_dropout=0.5)
    check(path, activation_checkpointing=True)
    folder = tmp_path / "gpt2"
    config = AutoConfig.for_model(
        "gpt2", vocab_size=64, n_embd=64, n_layer=2, n_head=2, attn_pdrop=0.5, resid_pdrop=0.5
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    check(str(folder), activation_checkpointing=True)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_stays_near_float32(dtype: Any, tmp_path: Path) -> None:
    path = tiny_model(tmp_path)
    rows = in_packed_order(some_rows())
    packed = pack(rows, range(len(rows)), CPU)
    found = []
    for amp in (AmpSpec(), AmpSpec(enabled=True, dtype=dtype)):
        model = PolicyModel(context(path, amp=amp), CPU)
        logprobs, _ = model.token_numbers(packed, 1.0)
        assert logprobs.dtype == torch.float32
        logprobs.mean().backward()
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.module.parameters())
        found.append(logprobs.detach())
    assert 0 < float((found[0] - found[1]).abs().max()) < 0.5


def no_model(tmp_path: Path) -> str:
    return ""


def no_folder(tmp_path: Path) -> str:
    return str(tmp_path / "nothing-here")


def no_config(tmp_path: Path) -> str:
    return str(tmp_path)


def cut_weights(tmp_path: Path) -> str:
    path = Path(tiny_model(tmp_path))
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    return str(path)


def recurrent(tmp_path: Path) -> str:
    return family_model(tmp_path, "mamba", state_size=8)


def capped_scores(tmp_path: Path) -> str:
    return family_model(tmp_path, "gemma2", query_pre_attn_scalar=16)


def encoder(tmp_path: Path) -> str:
    return family_model(tmp_path, "bert", is_decoder=False)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (no_model, "model.path is empty"),
        (no_folder, "is not a folder here"),
        (no_config, "cannot load a causal language model"),
        (cut_weights, "cannot load a causal language model"),
        (recurrent, "off by"),
        (capped_scores, "capped scores"),
        (encoder, "cannot train"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_sentence(
    make: Callable[[Path], str], words: str, tmp_path: Path
) -> None:
    path = make(tmp_path)
    with pytest.raises(WorkerFailed, match=words) as caught:
        PolicyModel(context(path), CPU)
    assert "\n" not in str(caught.value)
    assert path in str(caught.value)
