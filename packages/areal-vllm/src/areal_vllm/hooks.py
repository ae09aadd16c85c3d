"""What this package offers; nothing heavy is imported before it is asked for."""

from __future__ import annotations

from areal import Component, hookimpl
from areal.contracts.finding import Finding

INSTALL = "pip install 'areal-vllm[vllm]', or 'areal-vllm[cpu]' on a machine without GPU"


@hookimpl
def areal_engines() -> list[Component]:
    return [
        Component(
            name="vllm",
            factory="areal_vllm.engine:VllmEngine",
            options="areal_vllm.options:VllmOptions",
            summary="vLLM: paged attention, prefix cache, tensor parallel, LoRA; weights swapped between two steps.",
            requires=("vllm",),
            install=INSTALL,
            capabilities=frozenset({"lora"}),
        )
    ]


@hookimpl
def areal_findings() -> list[Finding]:
    from areal_vllm.findings import findings

    return findings(INSTALL)
