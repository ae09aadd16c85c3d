"""The resharder `disk`: files that survive, files that others can load, and every way a file can be wrong."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from areal.builtins.resharders.disk import DiskOptions, DiskReceiver, DiskResharder, DiskSender
from areal.contracts.transfer import Layout, Piece, Plan, TensorSpec
from areal.errors import TransferFailed

Weights = list[tuple[str, torch.Tensor]]


def weights(value: float) -> Weights:
    return [("a.weight", torch.full((3, 4), float(value))), ("b.bias", torch.full((5,), -float(value)))]


def specs(sent: Weights) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name=n, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch.")) for n, t in sent)


def make(folder: Path, sent: Weights | None = None, **options: int) -> tuple[Plan, DiskSender, DiskReceiver]:
    resharder = DiskResharder(DiskOptions(**options), str(folder))
    source = Layout(host="h", tensors=specs(sent or weights(0)))
    plan = resharder.plan(source, [Layout(host="h", dtype="bfloat16")])
    return plan, resharder.sender(plan), resharder.receiver(plan, 0)


def versions(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "weights").iterdir())


@pytest.mark.parametrize("max_file_bytes", [10**9, 20_000])
def test_transformers_loads_a_version(tmp_path: Path, max_file_bytes: int) -> None:
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    sent = list(model.named_parameters())
    _, sender, _ = make(tmp_path, sent, max_file_bytes=max_file_bytes)
    sender.send(3, sent, 30)
    folder = tmp_path / "weights" / "v00000003"
    assert ((folder / "model.safetensors.index.json").exists()) == (max_file_bytes == 20_000)
    config.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, dict(sent)[name].to(torch.bfloat16)), name


def test_files_are_cut_at_the_limit(tmp_path: Path) -> None:
    sent = [(f"t{i}", torch.zeros(10)) for i in range(5)]
    _, sender, _ = make(tmp_path, sent, max_file_bytes=45)  # two tensors of 20 bytes each
    sender.send(1, sent, 30)
    index = json.loads((tmp_path / "weights/v00000001/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 100
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def test_the_newest_two_stay_and_can_be_read(tmp_path: Path) -> None:
    _, sender, receiver = make(tmp_path)
    for version in (1, 2, 3, 4):
        sender.send(version, weights(version), 30)
    assert versions(tmp_path) == ["v00000003", "v00000004"]
    for version in (3, 4):
        assert dict(receiver.receive(version, 5))["a.weight"][0, 0] == version


def test_a_resumed_run_forgets_the_future_it_took_back(tmp_path: Path) -> None:
    _, sender, _ = make(tmp_path)
    for version in (6, 7):
        sender.send(version, weights(version), 30)
    (tmp_path / "weights" / "v00000007.tmp-99999").mkdir()  # what a killed sender leaves
    _, sender, _ = make(tmp_path)
    sender.send(5, weights(5), 30)
    assert versions(tmp_path) == ["v00000005"]


def test_leftovers_of_an_earlier_life_are_not_read(tmp_path: Path) -> None:
    _, old, _ = make(tmp_path)
    old.send(1, weights(1), 30)
    _, sender, receiver = make(tmp_path)
    with pytest.raises(
        TransferFailed, match=r"did not finish writing version 1 in .*weights within 0\.2 s \(there: v0"
    ):
        list(receiver.receive(1, 0.2))
    sender.send(1, weights(2), 30)
    assert dict(receiver.receive(1, 5))["b.bias"][0] == -2


def test_a_draft_is_not_a_version(tmp_path: Path) -> None:
    _, _, receiver = make(tmp_path)
    (tmp_path / "weights" / "v00000001.tmp-1").mkdir(parents=True)
    with pytest.raises(TransferFailed, match=r"sender did not finish writing version 1 .*\(there: nothing\)"):
        list(receiver.receive(1, 0.1))


@pytest.mark.parametrize("damage", ["cut", "garbage", "empty", "other tensors"])
def test_damaged_files_are_refused_in_one_sentence(tmp_path: Path, damage: str) -> None:
    _, sender, receiver = make(tmp_path)
    sender.send(1, weights(1), 30)
    file = tmp_path / "weights" / "v00000001" / "model.safetensors"
    whole = file.read_bytes()
    if damage == "other tensors":
        file.write_bytes(whole.replace(b"b.bias", b"c.bias"))
    else:
        file.write_bytes({"cut": whole[:-3], "garbage": b"\xff" * 64, "empty": b""}[damage])
    with pytest.raises(TransferFailed, match=r"engine 0 cannot read .*publish") as caught:
        list(receiver.receive(1, 5))
    assert "\n" not in str(caught.value)


def test_a_file_of_another_shape_is_refused(tmp_path: Path) -> None:
    plan, sender, _ = make(tmp_path)
    sender.send(1, weights(1), 30)
    source = Layout(host="h", tensors=(TensorSpec(name="a.weight", shape=(4, 3), dtype="float32"),))
    other = Plan(uid=plan.uid, source=source, targets=plan.targets, details=plan.details)
    with pytest.raises(TransferFailed, match=r"'a.weight' was written as \(\(3, 4\), 'bfloat16'\), but the plan says"):
        list(DiskReceiver(other, 0).receive(1, 5))


@pytest.mark.parametrize(
    ("sent", "sentence"),
    [
        (weights(1)[:1], "stopped before 'b.bias'"),
        (weights(1)[::-1], r"sent 'b.bias' of shape \(5,\) where its layout promises 'a.weight' of shape \(3, 4\)"),
        ([*weights(1), ("c", torch.zeros(1))], "sent 'c', which its layout does not name"),
    ],
)
def test_tensors_that_are_not_the_plans_are_refused(tmp_path: Path, sent: Weights, sentence: str) -> None:
    _, sender, receiver = make(tmp_path)
    with pytest.raises(TransferFailed, match=sentence):
        sender.send(1, sent, 30)
    with pytest.raises(TransferFailed, match=f"gave up version 1: .*{sentence}"):
        list(receiver.receive(1, 30))
    assert [path for path in (tmp_path / "weights").iterdir() if path.is_dir()] == []


def test_a_failed_version_can_be_sent_again(tmp_path: Path) -> None:
    _, sender, receiver = make(tmp_path)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(lambda: list(receiver.receive(1, 30)))
        with pytest.raises(TransferFailed):
            sender.send(1, weights(1)[:1], 30)
        with pytest.raises(TransferFailed, match="gave up version 1"):
            waiting.result()
        waiting = pool.submit(lambda: dict(receiver.receive(1, 30)))  # comes before its sender: must wait for it
        time.sleep(0.05)
        sender.send(1, weights(4), 30)
        assert waiting.result()["a.weight"][0, 0] == 4


def test_a_sender_that_is_too_slow_publishes_nothing(tmp_path: Path) -> None:
    _, sender, _ = make(tmp_path)
    with pytest.raises(TransferFailed, match="longer than the 0 s it had"):
        sender.send(1, weights(1), 0)
    assert versions(tmp_path) == ["v00000001.failed"]


def test_a_dtype_that_files_cannot_hold_is_refused(tmp_path: Path) -> None:
    sent = [("z", torch.zeros(2, dtype=torch.complex64))]
    _, sender, _ = make(tmp_path, sent)
    with pytest.raises(TransferFailed, match="'z' has dtype complex64, which safetensors files cannot hold"):
        sender.send(1, sent, 30)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    _, sender, _ = make(tmp_path)
    with pytest.raises(TransferFailed, match=r"gave up version 1: .*Permission denied"):
        sender.send(1, weights(1), 30)


def test_a_file_in_the_folders_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("not a folder")
    _, sender, _ = make(tmp_path)
    with pytest.raises(TransferFailed, match=r"gave up version 1: .*weights"):
        sender.send(1, weights(1), 30)


def test_a_plan_needs_a_folder() -> None:
    layout = Layout(host="h", tensors=specs(weights(0)))
    with pytest.raises(TransferFailed, match="'disk' has no folder"):
        DiskResharder(None, "").plan(layout, [layout])


def test_the_folder_option_wins_over_the_runs_folder(tmp_path: Path) -> None:
    layout = Layout(host="h", tensors=specs(weights(0)))
    plan = DiskResharder(DiskOptions(folder=str(tmp_path / "shared")), str(tmp_path)).plan(layout, [layout])
    assert plan.details["folder"] == str(tmp_path / "shared")


@pytest.mark.parametrize("max_file_bytes", [10**9, 45])
def test_each_rank_writes_files_of_its_own(tmp_path: Path, max_file_bytes: int) -> None:
    tensors = tuple(TensorSpec(name=f"t{i}", shape=(10, 2), dtype="float32") for i in range(3))
    cut = tuple(tuple(Piece(tensor=index, start=(0, column), shape=(10, 1)) for index in range(3)) for column in (0, 1))
    source = Layout(host="h", num_ranks=2, tensors=tensors, pieces=cut)
    resharder = DiskResharder(DiskOptions(max_file_bytes=max_file_bytes), str(tmp_path))
    plan = resharder.plan(source, [Layout(host="h", dtype="bfloat16")])
    senders = [resharder.sender(plan, rank) for rank in (0, 1)]
    folder = tmp_path / "weights"
    with ThreadPoolExecutor() as pool:
        for version in (1, 2, 3):
            (folder / f"v0000000{version}.tmp-99999").mkdir(parents=True)  # what a killed sender leaves
            sent = [[(f"t{i}", torch.full((10, 1), float(version + rank))) for i in range(3)] for rank in (0, 1)]
            for future in [pool.submit(senders[rank].send, version, sent[rank], 30) for rank in (0, 1)]:
                future.result()
            for _, tensor in resharder.receiver(plan, 0).receive(version, 5):
                assert tensor.tolist() == [[version, version + 1]] * 10
    for sender in senders * 2:
        sender.close()
    assert versions(tmp_path) == ["v00000002", "v00000003"]
    files = sorted(path.name for path in (folder / "v00000003").iterdir())
    number = 1 if max_file_bytes > 60 else 2
    assert len(files) == 2 * number and all(name.startswith(("rank-00000", "rank-00001")) for name in files)
