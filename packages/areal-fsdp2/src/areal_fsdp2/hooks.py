"""What this package offers; nothing heavy is imported before it is asked for."""

from __future__ import annotations

from areal import Component, hookimpl


@hookimpl
def areal_backends() -> list[Component]:
    return [
        Component(
            name="fsdp2",
            factory="areal_fsdp2.backend:Fsdp2Backend",
            options="areal_fsdp2.options:Fsdp2Options",
            summary="Many devices: FSDP2, tensor, sequence, pipeline and expert parallel.",
            requires=("torch", "transformers"),
            install="pip install areal-fsdp2",
            capabilities=frozenset({"distributed", "critic"}),
        )
    ]
