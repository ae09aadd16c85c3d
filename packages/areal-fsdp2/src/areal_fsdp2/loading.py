"""Loading: a module without memory is made from the configuration, and each rank reads its own slices of the files."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from areal.algorithms.update import attention
from areal.algorithms.update.module import stop_dropout
from areal.errors import WorkerFailed, first_line
from areal_fsdp2.shards import Part

ERRORS = (OSError, ValueError, KeyError, RuntimeError, ImportError, AssertionError, TypeError, SafetensorError)
INDEX = "model.safetensors.index.json"
WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
"""What a hub's repository has for us."""


def folder_of(path: str) -> Path:
    """Return the folder of a model, fetched if it is a hub id; WorkerFailed in one sentence."""
    if not path:
        raise WorkerFailed("the backend has no model: model.path is empty; give a Hugging Face folder or hub id")
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=WANTED))
    except ERRORS as error:
        raise WorkerFailed(
            f"the model {path!r} is not a folder here and could not be fetched as a hub id ({first_line(error)}); give "
            "a Hugging Face folder with config.json and safetensors weights"
        ) from error


def skeleton(kind: Any, folder: Path, **more: Any) -> PreTrainedModel:
    """Return the model of a folder with parameters on the device meta and real buffers; `kind` is an AutoModel class.

    Dropout is off, attention is within packed rows. WorkerFailed in one sentence.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, **more)
        with _parameters_on_meta():
            module = kind.from_config(config, dtype=torch.float32, attn_implementation="eager")
        module.set_attn_implementation(attention.NAME)
    except ERRORS as error:
        raise WorkerFailed(
            f"cannot load a causal language model from {str(folder)!r} ({first_line(error)}); give a Hugging Face "
            "folder with config.json and safetensors weights"
        ) from error
    module.eval()
    stop_dropout(module)
    return module


@torch.no_grad()
def materialise(root: nn.Module, device: torch.device) -> None:
    """Give the parameters of a module memory on `device`, not initialised; buffers keep their values."""
    buffers = {name: buffer.clone() for name, buffer in root.named_buffers()}
    tied = list(_tied(root))
    root.to_empty(device=device)
    for (module, name), (first, first_name) in tied:
        setattr(module, name, getattr(first, first_name))
    for name, buffer in root.named_buffers():
        buffer.copy_(buffers[name])


@torch.no_grad()
def read(parts: Sequence[Part], folder: Path, optional: Collection[str] = ()) -> None:
    """Fill parts from the safetensors files of a folder; those of the `optional` names that it does not hold with 0.

    WorkerFailed for another tensor that is missing, or has another shape.
    """
    try:
        with ExitStack() as opened:
            files = _Files(folder, opened)
            for part in parts:
                if part.name in optional and part.name not in files.names:
                    part.view.zero_()
                else:
                    part.view.copy_(files.slice(part))
    except ERRORS as error:
        raise WorkerFailed(
            f"cannot read the weights in {str(folder)!r} ({first_line(error)}); give a Hugging Face folder with "
            "safetensors weights of the model that its config.json describes"
        ) from error


class _Files:
    """The safetensors files of a folder. Invariant: a file is opened when the first of its tensors is wanted."""

    def __init__(self, folder: Path, opened: ExitStack) -> None:
        self._folder = folder
        self._stack = opened
        self._open: dict[str, Any] = {}
        if (index := folder / INDEX).is_file():
            self._file_of: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        else:
            names = sorted(path.name for path in folder.glob("*.safetensors"))
            if not names:
                raise OSError("it has no *.safetensors file")
            self._file_of = {key: name for name in names for key in self._handle(name).keys()}  # noqa: SIM118

    @property
    def names(self) -> Collection[str]:
        return self._file_of.keys()

    def slice(self, part: Part) -> Tensor:
        """Return a rank's part of a tensor; KeyError or ValueError when the files have another."""
        if part.name not in self._file_of:
            raise ValueError(f"it has no tensor {part.name}")
        whole = self._handle(self._file_of[part.name]).get_slice(part.name)
        if tuple(whole.get_shape()) != part.shape:
            raise ValueError(f"{part.name} has shape {tuple(whole.get_shape())}, not {part.shape}")
        return whole[part.box]

    def _handle(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = self._stack.enter_context(safe_open(self._folder / name, framework="pt"))
        return self._open[name]


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Within the block a module's parameters lose their memory when they are registered; buffers keep theirs."""
    register = nn.Module.register_parameter

    def registered(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.data.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = registered
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _tied(root: nn.Module) -> Iterator[tuple[tuple[nn.Module, str], tuple[nn.Module, str]]]:
    """Yield places of parameters that stand in two modules: the later and the first."""
    first: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    for module in root.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in first:
                yield (module, name), first[parameter]
            first.setdefault(parameter, (module, name))
