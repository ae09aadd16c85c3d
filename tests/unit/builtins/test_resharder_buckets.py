"""Properties: whatever the shapes, dtypes and bucket size, exact bytes arrive exactly once on every road."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal.builtins.resharders.bucket import schedule
from areal.builtins.resharders.disk import DiskOptions, DiskResharder
from areal.builtins.resharders.xccl import XcclOptions, XcclResharder
from areal.contracts.transfer import Layout, TensorSpec, checksum

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@given(
    sizes=st.lists(st.integers(0, 40), max_size=12),
    bucket_bytes=st.integers(1, 50),
)
def test_buckets_cover_each_byte_once_and_in_order(sizes: list[int], bucket_bytes: int) -> None:
    buckets = list(schedule(sizes, bucket_bytes))
    bytes_seen = [(p.item, at) for bucket in buckets for p in bucket for at in range(p.start, p.stop)]
    assert bytes_seen == [(item, at) for item, size in enumerate(sizes) for at in range(size)]
    assert all(0 < sum(piece.size for piece in bucket) <= bucket_bytes for bucket in buckets)


def test_small_tensors_share_a_bucket_and_large_ones_do_not() -> None:
    buckets = list(schedule([3, 3, 10, 3, 0, 3], bucket_bytes=8))
    assert [[(p.item, p.start, p.stop) for p in bucket] for bucket in buckets] == [
        [(0, 0, 3), (1, 0, 3)],
        [(2, 0, 8)],
        [(2, 8, 10)],
        [(3, 0, 3), (5, 0, 3)],
    ]


@st.composite
def tensors(draw: st.DrawFn) -> list[tuple[str, torch.Tensor]]:
    made: list[tuple[str, torch.Tensor]] = []
    for index in range(draw(st.integers(1, 6))):
        shape = draw(st.lists(st.integers(0, 6), max_size=3))
        dtype = draw(st.sampled_from([*DTYPES, torch.int64, torch.uint8]))
        values = torch.randint(-300, 300, shape, generator=torch.Generator().manual_seed(index)).to(dtype)
        layout = draw(st.sampled_from(["plain", "transposed", "strided"]))
        if layout == "transposed":
            values = values.movedim(0, -1) if values.dim() > 1 else values
        if layout == "strided" and values.dim():
            values = torch.stack([values, values], dim=-1)[..., 0]
        made.append((f"t{index}", values))
    return made


def roads(bucket_bytes: int, folder: str) -> list[Any]:
    # A recipe may not ask for buckets this small, which cut the small tensors of these tests.
    gloo = XcclOptions(shared_memory="never").model_copy(update={"bucket_bytes": bucket_bytes})
    return [
        DiskResharder(DiskOptions(max_file_bytes=bucket_bytes), folder),
        XcclResharder(XcclOptions(), ""),
        XcclResharder(gloo, ""),
    ]


@pytest.mark.parametrize("road", ["disk", "shared memory", "gloo"])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sent=tensors(),
    dtype=st.sampled_from(DTYPES),
    bucket_bytes=st.sampled_from([3, 64, 1000]),
    num_receivers=st.integers(1, 3),
)
def test_exact_bytes_arrive_exactly_once(
    road: str, sent: list[tuple[str, torch.Tensor]], dtype: torch.dtype, bucket_bytes: int, num_receivers: int
) -> None:
    specs = tuple(TensorSpec(name=n, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch.")) for n, t in sent)
    target = Layout(host="h", dtype=str(dtype).removeprefix("torch."))
    wanted = [(n, t.to(dtype) if t.is_floating_point() else t) for n, t in sent]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        pool = stack.enter_context(ThreadPoolExecutor(num_receivers))
        resharder = roads(bucket_bytes, folder)[["disk", "shared memory", "gloo"].index(road)]
        plan = resharder.plan(Layout(host="h", tensors=specs), [target] * num_receivers)
        sender, receivers = resharder.sender(plan), [resharder.receiver(plan, i) for i in range(num_receivers)]
        for half in (sender, *receivers):
            stack.callback(half.close)
        arriving = [pool.submit(lambda receiver: list(receiver.receive(1, 30)), receiver) for receiver in receivers]
        receipt = sender.send(1, sent, 30)
        arrived = [future.result() for future in arriving]
    for one in arrived:
        assert [name for name, _ in one] == [name for name, _ in wanted]
        for (_, got), (_, want) in zip(one, wanted, strict=True):
            assert got.dtype == want.dtype
            assert torch.equal(got, want)
    assert receipt.checksums == {name: checksum(want) for name, want in wanted}
    assert receipt.num_bytes == sum(want.numel() * want.element_size() for _, want in wanted)
