"""Boxes of several trainer ranks: whatever the cut, whole tensors with exact bytes come out on every road."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal.builtins.resharders.bucket import merged
from areal.builtins.resharders.disk import DiskOptions, DiskResharder
from areal.builtins.resharders.pieces import Assembly, check_pieces, items_of, sending_ranks
from areal.builtins.resharders.xccl import XcclOptions, XcclResharder
from areal.contracts.transfer import Layout, Piece, Plan, TensorSpec, checksum, piece_name
from areal.errors import TransferFailed

Box = tuple[tuple[int, ...], tuple[int, ...]]


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Cut a tensor again and again, along any dimension, sometimes at its edge."""
    found: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 4)) if shape else 0):
        start, size = found.pop(draw(st.integers(0, len(found) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, size[dim]))
        found.append((start, (*size[:dim], at, *size[dim + 1 :])))
        found.append(
            ((*start[:dim], start[dim] + at, *start[dim + 1 :]), (*size[:dim], size[dim] - at, *size[dim + 1 :]))
        )
    return found


@st.composite
def sources(draw: st.DrawFn) -> Layout:
    """A trainer of up to 4 ranks whose tensors are cut anyhow; some ranks may have nothing, the first one too."""
    num_ranks = draw(st.integers(1, 4))
    specs: list[TensorSpec] = []
    pieces: list[list[Piece]] = [[] for _ in range(num_ranks)]
    for index in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        specs.append(
            TensorSpec(name=f"t{index}", shape=shape, dtype=draw(st.sampled_from(["float32", "bfloat16", "uint8"])))
        )
        for start, size in draw(boxes(shape)):
            pieces[draw(st.integers(0, num_ranks - 1))].append(Piece(tensor=index, start=start, shape=size))
    return Layout(
        host="h", dtype="float32", num_ranks=num_ranks, tensors=tuple(specs), pieces=tuple(map(tuple, pieces))
    )


def values(source: Layout) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, 250, spec.shape, generator=generator).to(getattr(torch, spec.dtype)) for spec in source.tensors
    ]


@given(source=sources())
def test_every_cut_that_covers_is_accepted_and_none_that_does_not(source: Layout) -> None:
    check_pieces(source)
    for rank, pieces in enumerate(source.pieces):
        for number, piece in enumerate(pieces):
            if not torch.empty(piece.shape).numel():
                continue
            fewer = (*pieces[:number], *pieces[number + 1 :])
            twice = (*pieces[:number], piece, *pieces[number:])
            for wrong in (fewer, twice):
                ranks = (*source.pieces[:rank], wrong, *source.pieces[rank + 1 :])
                with pytest.raises(TransferFailed, match="do not cover it exactly once"):
                    check_pieces(Layout(host="h", tensors=source.tensors, pieces=ranks))


@pytest.mark.parametrize(
    ("pieces", "sentence"),
    [
        ([[(1, (0,), (4,)), (0, (0,), (4,))]], "rank 0 are not in the order"),
        ([[(0, (0,), (4,)), (2, (0,), (4,))]], "rank 0 are not in the order"),
        ([[(0, (0,), (4,))], [(1, (-1,), (4,))]], "'b' do not cover it exactly once"),
        ([[(0, (0,), (4,))], [(1, (1,), (4,))]], "'b' do not cover it exactly once"),
        ([[(0, (0,), (4,)), (1, (0, 0), (4, 1))]], "'b' do not cover it exactly once"),
        ([[(0, (0,), (4,)), (1, (0,), (3,))], [(1, (0,), (1,))]], "'b' do not cover it exactly once"),
    ],
)
def test_boxes_that_lie_wrong_are_refused(pieces: Any, sentence: str) -> None:
    specs = tuple(TensorSpec(name=name, shape=(4,), dtype="float32") for name in "ab")
    ranks = tuple(
        tuple(Piece(tensor=tensor, start=start, shape=shape) for tensor, start, shape in rank) for rank in pieces
    )
    source = Layout(host="h", tensors=specs, pieces=ranks)
    for resharder in (XcclResharder(None, ""), DiskResharder(None, "folder")):
        with pytest.raises(TransferFailed, match=sentence):
            resharder.plan(source, [source])


@given(source=sources(), bucket_bytes=st.integers(1, 200))
def test_receivers_keep_each_ranks_order_and_take_every_byte_once(source: Layout, bucket_bytes: int) -> None:
    plan = Plan(uid="p", source=source, targets=(Layout(host="h"),))
    streams = [items_of(plan, rank) for rank in sending_ranks(source)]
    order = merged(streams, bucket_bytes)
    for stream, items in enumerate(streams):
        seen = [
            (part.item, at)
            for which, parts in order
            if which == stream
            for part in parts
            for at in range(part.start, part.stop)
        ]
        assert seen == [(index, at) for index, item in enumerate(items) for at in range(item.num_bytes)]
    tensors = [streams[stream][parts[0].item].piece.tensor for stream, parts in order]
    assert tensors == sorted(tensors)


@given(source=sources(), keep=st.booleans())
def test_an_assembly_gives_each_tensor_once_and_whole(source: Layout, keep: bool) -> None:
    plan = Plan(uid="p", source=source, targets=(Layout(host="h", dtype="float32"),))
    wholes = values(source)
    assembly = Assembly(plan, torch.device("cpu"))
    arrived: list[tuple[str, torch.Tensor]] = []
    for rank in reversed(range(source.num_ranks)):
        for item in items_of(plan, rank):
            part = wholes[item.piece.tensor][item.piece.box].to(getattr(torch, item.spec.dtype))
            arrived += assembly.add(item, part.clone(), keep=keep)
    arrived += assembly.rest()
    assert sorted(name for name, _ in arrived) == [spec.name for spec in source.tensors]
    for name, tensor in arrived:
        want = wholes[int(name[1:])]
        assert torch.equal(tensor, want.float() if want.is_floating_point() else want)


def roads(bucket_bytes: int, folder: str) -> dict[str, Any]:
    # A recipe may not ask for buckets this small, which cut the small tensors of these tests.
    gloo = XcclOptions(shared_memory="never").model_copy(update={"bucket_bytes": bucket_bytes})
    return {
        "disk": DiskResharder(DiskOptions(max_file_bytes=bucket_bytes), folder),
        "shared memory": XcclResharder(XcclOptions(), ""),
        "gloo": XcclResharder(gloo.model_copy(update={"delta": "never"}), ""),
        "delta": XcclResharder(gloo.model_copy(update={"delta": "always"}), ""),
    }


@pytest.mark.parametrize("road", ["disk", "shared memory", "gloo", "delta"])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(source=sources(), bucket_bytes=st.sampled_from([3, 64, 1000]), num_receivers=st.integers(1, 2))
def test_exact_bytes_arrive_from_any_cut(road: str, source: Layout, bucket_bytes: int, num_receivers: int) -> None:
    wholes = values(source)
    with ExitStack() as stack:
        resharder = roads(bucket_bytes, stack.enter_context(tempfile.TemporaryDirectory()))[road]
        plan = resharder.plan(source, [Layout(host="h", dtype="bfloat16")] * num_receivers)
        senders = [resharder.sender(plan, rank) for rank in range(source.num_ranks)]
        receivers = [resharder.receiver(plan, index) for index in range(num_receivers)]
        pool = stack.enter_context(ThreadPoolExecutor(source.num_ranks + num_receivers))
        for half in (*senders, *receivers):
            stack.callback(half.close)
        for version in (1, 2):
            wholes = [tensor + 1 for tensor in wholes]
            wanted = [t.bfloat16() if t.is_floating_point() else t for t in wholes]
            arriving = [pool.submit(lambda each, v: list(each.receive(v, 30)), each, version) for each in receivers]
            sending = [
                pool.submit(sender.send, version, _sent(source, rank, wholes), 30)
                for rank, sender in enumerate(senders)
            ]
            receipts = [future.result() for future in sending]
            for future in arriving:
                arrived = sorted(future.result(), key=lambda pair: pair[0])
                assert [name for name, _ in arrived] == [spec.name for spec in source.tensors]
                assert all(torch.equal(got, want) for (_, got), want in zip(arrived, wanted, strict=True))
            assert {name: crc for receipt in receipts for name, crc in receipt.checksums.items()} == {
                piece_name(source.tensors[piece.tensor], piece): checksum(wanted[piece.tensor][piece.box])
                for pieces in source.pieces
                for piece in pieces
            }


def _sent(source: Layout, rank: int, wholes: list[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return [(source.tensors[piece.tensor].name, wholes[piece.tensor][piece.box]) for piece in source.pieces[rank]]
