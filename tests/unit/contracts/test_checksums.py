"""The checksum both sides of a weight update compute: CRC-32 of the tensor's bytes, however it lies."""

from __future__ import annotations

import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.contracts.transfer import checksum, local_host


def crc(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of the bytes in row-major order, found by another way."""
    return zlib.crc32(bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), (1,)])
def test_it_is_the_crc_of_the_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)
    assert checksum(tensor) == crc(tensor)


def test_tensors_that_do_not_lie_in_a_row() -> None:
    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    for view in (whole.T, whole[:, 1:4], whole[::2], whole.flip(0)[1:], whole[0, 0].expand(3, 3)):
        assert checksum(view) == crc(view) == checksum(view.clone())
    assert checksum(whole.T) != checksum(whole)


def test_empty_scalar_and_trained_tensors() -> None:
    assert checksum(torch.empty(0)) == checksum(torch.empty(3, 0, dtype=torch.bfloat16)) == zlib.crc32(b"") == 0
    assert checksum(torch.tensor(1.5)) == crc(torch.tensor([1.5]))
    weight = torch.nn.Parameter(torch.ones(2, 2))
    assert checksum(weight) == crc(weight.detach())


@given(st.integers(0, 99), st.integers(0, 7))
@settings(max_examples=30, deadline=None)
def test_one_flipped_bit_changes_it(position: int, bit: int) -> None:
    tensor = torch.arange(100, dtype=torch.uint8)
    flipped = tensor.clone()
    flipped[position] ^= 1 << bit
    assert checksum(flipped) != checksum(tensor)


def test_the_host_is_the_same_for_every_process_of_this_machine() -> None:
    assert local_host() == local_host() and "/" in local_host()
