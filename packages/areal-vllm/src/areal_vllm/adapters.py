"""LoRA adapters as versions: staged as a PEFT folder in memory, replaced in place, so that running requests go on."""

# pyright: reportMissingImports=false
# vLLM has an environment of its own.
from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from areal.contracts.transfer import Adapter
from areal.errors import TransferFailed

NAME, NUMBER = "policy", 1


def write_adapter(adapter: Adapter, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write PEFT's two files."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": list(adapter.target_modules),
        "bias": "none",
    }
    folder.joinpath("adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "adapter_model.safetensors")


class Adapters:
    """The adapter that a vLLM engine serves. Invariant: at most one, and requests begun after it came use it."""

    def __init__(self) -> None:
        self.request: Any = None
        """vLLM's LoRARequest for new requests, or None for the bare model."""

    def commit(self, engine: Any, adapter: Adapter, weights: Mapping[str, Tensor]) -> None:
        """Load an adapter, in place of the one before; a command of the stepper. TransferFailed in vLLM's words."""
        from vllm.lora.request import LoRARequest

        if engine.vllm_config.lora_config is None:
            raise TransferFailed(
                "the trainer publishes LoRA adapters and vLLM was started without; set engine.enable_lora to true and "
                f"engine.max_lora_rank to at least {adapter.rank}"
            )
        folder = Path(tempfile.mkdtemp(prefix="areal-adapter-"))
        try:
            write_adapter(adapter, weights, folder)
            request = LoRARequest(NAME, NUMBER, str(folder), load_inplace=self.request is not None)
            engine.add_lora(request)
        except Exception as error:
            raise TransferFailed(f"vLLM does not take the adapter: {error}") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        # The files are gone: whoever uses this request finds the adapter loaded.
        self.request = LoRARequest(NAME, NUMBER, str(folder))

    def remove(self, engine: Any) -> None:
        """Unload the adapter, if there is one; a command of the stepper."""
        if self.request is not None:
            engine.remove_lora(NUMBER)
            self.request = None
