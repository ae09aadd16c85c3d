"""safetensors files written item by item, so that the sender holds one cast tensor at a time.

The format is documented at https://huggingface.co/docs/safetensors/index: eight bytes with the length of a JSON
header (little endian), the header, then the tensors' bytes without gaps.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from areal.builtins.resharders.pieces import Item
from areal.builtins.resharders.wire import checked, torch_dtype
from areal.contracts.durable import sync
from areal.contracts.transfer import checksum
from areal.errors import TransferFailed

INDEX = "model.safetensors.index.json"
FORMAT_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


def split(items: Sequence[Item], max_file_bytes: int, stem: str = "model") -> dict[str, list[Item]]:
    """Return file name -> its items: full files in order, an item above the limit has a file of its own."""
    groups: list[list[Item]] = [[]]
    filled = 0
    for item in items:
        if groups[-1] and filled + item.num_bytes > max_file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += item.num_bytes
    if len(groups) == 1:
        return {f"{stem}.safetensors": groups[0]}
    return {f"{stem}-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def write_weights(
    folder: Path, files: Mapping[str, Sequence[Item]], tensors: Iterable[tuple[str, torch.Tensor]], plan_uid: str
) -> dict[str, int]:
    """Write and fsync all files into an existing folder; return the CRC-32 of each item's bytes."""
    stream = checked([item.spec for group in files.values() for item in group], tensors)
    checksums: dict[str, int] = {}
    for name, group in files.items():
        with (folder / name).open("wb") as file:
            offsets = _write_header(file, group, {"format": "pt", "plan": plan_uid})
            for item in group:
                spec, tensor = next(stream)
                cast = tensor.to(device="cpu", dtype=torch_dtype(spec.dtype)).contiguous()
                checksums[item.name] = checksum(cast)
                file.seek(offsets[item.name])
                if size := item.num_bytes:
                    file.write((ctypes.c_char * size).from_address(cast.data_ptr()))
            _sync(file)
    next(stream, None)  # lets `checked` refuse a tensor too many
    sync(folder)
    return checksums


def _write_header(file: BinaryIO, group: Sequence[Item], metadata: dict[str, str]) -> dict[str, int]:
    """Write the header and return each item's place in the file; wide dtypes first keep all of them aligned."""
    header: dict[str, object] = {"__metadata__": metadata}
    places: dict[str, int] = {}
    end = 0
    for item in sorted(group, key=lambda item: -torch_dtype(item.spec.dtype).itemsize):
        spec = item.spec
        if spec.dtype not in FORMAT_DTYPES:
            raise TransferFailed(
                f"{item.name!r} has dtype {spec.dtype}, which safetensors files cannot hold;"
                f" they hold {', '.join(FORMAT_DTYPES)}"
            )
        places[item.name], end = end, end + item.num_bytes
        header[item.name] = {
            "dtype": FORMAT_DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [places[item.name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    return {name: 8 + len(text) + place for name, place in places.items()}


def write_index(folder: Path, files: Mapping[str, Sequence[Item]]) -> None:
    """Write which file holds which tensor, as transformers reads it."""
    index = {
        "metadata": {"total_size": sum(item.num_bytes for group in files.values() for item in group)},
        "weight_map": {item.name: name for name, group in files.items() for item in group},
    }
    with (folder / INDEX).open("wb") as file:
        file.write(json.dumps(index, indent=1).encode())
        _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
