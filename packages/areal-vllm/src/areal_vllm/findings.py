"""What `areal doctor` says of vLLM: which one is here, and the state of each patch."""

# pyright: reportMissingImports=false
# vLLM has an environment of its own.
from __future__ import annotations

from areal.contracts.finding import Finding
from areal.errors import ArealError
from areal_vllm import environment

TOPIC = "areal-vllm"


def findings(install: str) -> list[Finding]:
    """Import vLLM and apply the patches as in an engine's process; called in a process of its own."""
    environment.prepare("cpu", compiles=False)
    try:
        import vllm
    except Exception as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "vllm"
        said = "not in this environment; engine.python names another one" if absent else f"cannot be imported: {error}"
        return [Finding(topic=TOPIC, name="vllm", state="absent" if absent else "broken", detail=said, command=install)]
    from areal_vllm import calls, patch

    found: list[Finding] = []
    try:
        calls.check_version()
        found.append(Finding(topic=TOPIC, name="vllm", state="ok", detail=vllm.__version__))
    except ArealError as error:
        found.append(Finding(topic=TOPIC, name="vllm", state="broken", detail=str(error)))
    for row in patch.PATCHES:
        name = f"patch {row.name}"
        try:
            row.apply()
            detail = {"applied": f"applied: {row.reason}", "native": "not needed, this vLLM has it itself"}
            found.append(Finding(topic=TOPIC, name=name, state="ok", detail=detail[row.state()]))
        except ArealError as error:
            found.append(Finding(topic=TOPIC, name=name, state="broken", detail=str(error)))
    return found
