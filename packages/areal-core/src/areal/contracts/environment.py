"""The environment: tasks and their rewards. Agents are outside; training only watches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from areal.contracts.messages import Completion, Outcome, Prompt

Split = Literal["train", "test"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the model said. Invariant: `text` is `completion.token_ids` decoded, special tokens left out."""

    text: str
    completion: Completion

    @property
    def finished(self) -> bool:
        """Whether the model itself ended the answer (a stop token)."""
        return self.completion.finish_reason == "stop"


class Client(Protocol):
    """An episode's line to the engine. Invariant: every call is recorded as one turn of the trajectory."""

    async def chat(self, messages: Sequence[Mapping[str, str]], *, max_new_tokens: int | None = None) -> Reply:
        """Send the conversation so far and return the model's next message."""
        ...


@runtime_checkable
class Environment(Protocol):
    """Made as ``factory(options, EnvironmentContext)``. Invariant: `prompts` is the same sequence in every process."""

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Return the tasks of a split; its length and order never change."""
        ...

    async def episode(self, prompt: Prompt, client: Client) -> Outcome:
        """Play one task to its end; an exception becomes outcome ``error``, a missed deadline ``timeout``."""
        ...
