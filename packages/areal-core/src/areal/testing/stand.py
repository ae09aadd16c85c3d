"""The test stand of engines: a running engine, the weights of every version it was given, and what they say."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from itertools import count, groupby
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from areal.contracts.engine import Engine
from areal.contracts.messages import Completion, GenerateRequest, Sampling
from areal.contracts.transfer import Layout, Phase, Receipt, Transfer
from areal.testing.models import tiny_module
from areal.testing.transfer import FOLDER_RESHARDER, FolderOptions, FolderResharder

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
KvPolicy = Literal["keep", "recompute"]

# Long enough for a loaded machine; no passing case waits for it.
DEADLINE_S = 60.0
START_DEADLINE_S = 300.0


class Stand:
    """Holds a started engine and its event loop. Invariant: `models[v]` are the weights of version v, and the
    engine, when idle, runs `version`.

    Version v of the tiny model is the one made from seed v; version 0 is what the engine loaded.
    """

    def __init__(self, engine: Engine, *, tied: bool, folder: str) -> None:
        self.engine = engine
        self.version = 0
        self.layout: Layout
        self.models: dict[int, Any] = {0: tiny_module(seed=0, tied=tied)}
        self._tied = tied
        self._runner = asyncio.Runner()
        self._options = FolderOptions(folder=folder)
        self._resharder = FolderResharder(self._options, "")
        self._uids = count()
        self._versions = count(1)

    def start(self) -> None:
        self.layout = self.run(self.engine.start(), START_DEADLINE_S)

    def close(self) -> None:
        try:
            self.run(self.engine.close())
        finally:
            self._runner.close()

    def run(self, work: Coroutine[Any, Any, T], deadline_s: float = DEADLINE_S) -> T:
        """Run to its end in the engine's event loop; TimeoutError after the deadline."""

        async def within() -> T:
            async with asyncio.timeout(deadline_s):
                return await work

        return self._runner.run(within())

    def request(self, prompt: Sequence[int], seed: int = 0, **sampling: Any) -> GenerateRequest:
        uid = f"request-{next(self._uids)}"
        return GenerateRequest(uid=uid, prompt_ids=tuple(prompt), sampling=Sampling(**sampling), seed=seed)

    def generate(self, requests: Iterable[GenerateRequest]) -> list[Completion]:
        """Run requests side by side and return their completions in order."""
        return self.run(self.gather(requests))

    async def gather(self, requests: Iterable[GenerateRequest]) -> list[Completion]:
        return list(await asyncio.gather(*(self.engine.generate(request) for request in requests)))

    def new_version(self) -> int:
        """Make the weights of one more version and return its number."""
        version = next(self._versions)
        self.models[version] = tiny_module(seed=version, tied=self._tied)
        return version

    def tensors(self, version: int) -> dict[str, Tensor]:
        """Return a version's parameters by HF name; tied ones once."""
        return {name: parameter.detach() for name, parameter in self.models[version].named_parameters()}

    def send(self, version: int, tensors: Mapping[str, Tensor] | None = None) -> Receipt:
        """Send a version, or the given tensors under its number."""
        sender = self._resharder.sender(self._resharder.plan(self.layout, [self.layout]))
        return sender.send(version, (self.tensors(version) if tensors is None else tensors).items(), DEADLINE_S)

    async def receive(self, phase: Phase, version: int, deadline_s: float = DEADLINE_S) -> Receipt:
        plan = self._resharder.plan(self.layout, [self.layout])
        return await self.engine.receive(
            Transfer(
                phase=phase,
                version=version,
                resharder=FOLDER_RESHARDER,
                options=self._options,
                plan=plan,
                deadline_s=deadline_s,
            )
        )

    async def update(self, version: int) -> Receipt:
        """Stage a version, then pause, commit and resume, as the publisher does; return the stage's receipt."""
        self.send(version)
        receipt = await self.receive("stage", version)
        await self.engine.pause("keep")
        try:
            await self.receive("commit", version)
            self.version = version
        finally:
            await self.engine.resume()
        return receipt

    def truth(self, completion: Completion, temperature: float = 1.0, kv_on_update: KvPolicy = "keep") -> Tensor:
        """Return [T, V] float32 logprobs that transformers gives at each of the completion's tokens.

        A token of version v comes from version v's weights: with ``recompute`` over the whole text before it, with
        ``keep`` over the keys and values that earlier versions left.
        """
        import torch

        with torch.inference_mode():
            logits = self._recomputed(completion) if kv_on_update == "recompute" else self._kept(completion)
            return (logits / temperature).log_softmax(dim=-1)

    def _recomputed(self, completion: Completion) -> Tensor:
        import torch

        ids = torch.tensor([completion.prompt_ids + completion.token_ids])
        first = len(completion.prompt_ids) - 1
        by_version = {v: self.models[v](ids).logits[0, first:-1] for v in set(completion.versions)}
        return torch.stack([by_version[v][i] for i, v in enumerate(completion.versions)])

    def _kept(self, completion: Completion) -> Tensor:
        import torch
        from transformers import DynamicCache

        ids = completion.prompt_ids + completion.token_ids
        cache, rows, fed, end = DynamicCache(), [], 0, len(completion.prompt_ids) - 1
        for version, run in groupby(completion.versions):
            num_tokens = len(list(run))
            start, end = fed, end + num_tokens
            output = self.models[version](torch.tensor([ids[start:end]]), past_key_values=cache, use_cache=True)
            rows.append(output.logits[0, -num_tokens:])
            fed = end
        return torch.cat(rows)
