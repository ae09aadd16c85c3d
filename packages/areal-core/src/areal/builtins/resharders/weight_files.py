"""safetensors files written tensor by tensor, so that the sender holds one cast tensor at a time.

The format is documented at https://huggingface.co/docs/safetensors/index: eight bytes with the length of a JSON
header (little endian), the header, then the tensors' bytes without gaps.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from areal.builtins.resharders.wire import checked, num_bytes, torch_dtype
from areal.contracts.transfer import TensorSpec, checksum
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


def split(specs: Sequence[TensorSpec], max_file_bytes: int) -> dict[str, list[TensorSpec]]:
    """Return file name -> its tensors: full files in order, a tensor above the limit has a file of its own."""
    groups: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if groups[-1] and filled + num_bytes(spec) > max_file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += num_bytes(spec)
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def write_weights(
    folder: Path,
    specs: Sequence[TensorSpec],
    tensors: Iterable[tuple[str, torch.Tensor]],
    max_file_bytes: int,
    metadata: dict[str, str],
) -> dict[str, int]:
    """Write and fsync all files into an existing folder; return the CRC-32 of each tensor's bytes."""
    files = split(specs, max_file_bytes)
    stream = checked(specs, tensors)
    checksums: dict[str, int] = {}
    for name, group in files.items():
        with (folder / name).open("wb") as file:
            offsets = _write_header(file, group, metadata)
            for _ in group:
                spec, tensor = next(stream)
                cast = tensor.to(device="cpu", dtype=torch_dtype(spec.dtype)).contiguous()
                checksums[spec.name] = checksum(cast)
                file.seek(offsets[spec.name])
                if size := num_bytes(spec):
                    file.write((ctypes.c_char * size).from_address(cast.data_ptr()))
            _sync(file)
    next(stream, None)  # lets `checked` refuse a tensor too many
    if len(files) > 1:
        _write_index(folder, files)
    sync_folder(folder)
    return checksums


def _write_header(file: BinaryIO, group: Sequence[TensorSpec], metadata: dict[str, str]) -> dict[str, int]:
    """Write the header and return each tensor's place in the file; wide dtypes first keep all of them aligned."""
    header: dict[str, object] = {"__metadata__": metadata}
    places: dict[str, int] = {}
    end = 0
    for spec in sorted(group, key=lambda spec: -torch_dtype(spec.dtype).itemsize):
        if spec.dtype not in FORMAT_DTYPES:
            raise TransferFailed(
                f"{spec.name!r} has dtype {spec.dtype}, which safetensors files cannot hold;"
                f" they hold {', '.join(FORMAT_DTYPES)}"
            )
        places[spec.name], end = end, end + num_bytes(spec)
        header[spec.name] = {
            "dtype": FORMAT_DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [places[spec.name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    return {name: 8 + len(text) + place for name, place in places.items()}


def _write_index(folder: Path, files: dict[str, list[TensorSpec]]) -> None:
    index = {
        "metadata": {"total_size": sum(num_bytes(spec) for group in files.values() for spec in group)},
        "weight_map": {spec.name: name for name, group in files.items() for spec in group},
    }
    with (folder / INDEX).open("wb") as file:
        file.write(json.dumps(index, indent=1).encode())
        _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Put a folder's names on disk; a rename is lost in a power cut without it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
