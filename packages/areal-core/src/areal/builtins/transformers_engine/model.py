"""The model: prefill and decode passes of a Hugging Face causal language model over the slot cache."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from areal.algorithms.update.regions import checkpoint_tensors
from areal.builtins.moving import free_unused, move_module
from areal.builtins.transformers_engine.cache import SlotCache
from areal.builtins.transformers_engine.head import LmHead
from areal.builtins.transformers_engine.loading import load_model, stop_ids
from areal.builtins.transformers_engine.options import TransformersEngineOptions
from areal.contracts.specs import ModelSpec
from areal.errors import WorkerFailed


class CausalModel:
    """Invariant: a pass over n rows reads and writes their slots only, and leaves the weights alone."""

    def __init__(self, spec: ModelSpec, device: str, options: TransformersEngineOptions) -> None:
        self.device = device
        self.module = load_model(spec, device, options.attention)
        self.stop_ids = stop_ids(self.module, spec.path)
        config = self.module.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.max_tokens: int = getattr(config, "max_position_embeddings", None) or 1 << 30
        head = self.module.get_output_embeddings()
        assert head is not None  # load_model has looked
        self._head = LmHead(head)
        # transformers renamed the argument in 5.2x and will drop the old name.
        arguments = inspect.signature(type(self.module).forward).parameters
        self._cache_argument = "cache" if "cache" in arguments else "past_key_values"
        self._masked = torch.finfo(self.module.dtype).min
        self._options = options
        self.forget()
        self._probe(spec)

    def forget(self) -> None:
        """Free the cache."""
        self.cache = SlotCache(self._options.max_batch, self.max_tokens, self._options.max_kv_tokens)

    def move(self, device: str) -> None:
        """Move weights and cache; the parameters stay the same objects. Passes run on `self.device` only."""
        move_module(self.module, device)
        self.cache.to(device)
        free_unused(self.device)

    def parameters(self) -> dict[str, Tensor]:
        """Return all weights by the checkpoint's names; tied ones stand under each of theirs.

        Those that the module stacks are views, to be dropped before `move`.
        """
        return dict(checkpoint_tensors(self.module.named_parameters(remove_duplicate=False)))

    def expected(self) -> dict[str, Tensor]:
        """Return what updates must bring: `parameters`, where there are views tensors without memory in their place."""
        return {name: w if isinstance(w, nn.Parameter) else w.to("meta") for name, w in self.parameters().items()}

    @torch.inference_mode()
    def prefill(self, start: int, contexts: Sequence[tuple[int, ...]], sources: Sequence[int]) -> Tensor:
        """Compute `contexts` and put row i's keys, those of ``contexts[sources[i]]``, into slot `start` + i.

        Returns [len(sources), V] logits after each row's last token. Contexts are padded at the right: attention is
        causal, so that no real token sees the padding.
        """
        length = max(map(len, contexts))
        # Padded with the last token: some models warn when they meet their pad token without a mask.
        padded = [[*context, *context[-1:] * (length - len(context))] for context in contexts]
        ids = torch.tensor(padded, device=self.device)
        source = torch.tensor(sources, device=self.device) if len(contexts) < len(sources) else None
        self.cache.prefill(start, start + len(sources), length, source)
        self._head.index = torch.tensor([len(context) - 1 for context in contexts], device=self.device)
        try:
            logits = self._forward(ids, torch.arange(length, device=self.device).expand(len(contexts), -1), None)
        finally:
            self._head.index = None
        return logits if source is None else logits[source]

    @torch.inference_mode()
    def decode(self, tokens: Tensor, positions: Tensor, length: int) -> Tensor:
        """Feed `tokens` ([n] int64) at `positions` ([n] int64) to slots 0..n-1; return [n, V] logits.

        `length`: the highest position + 1.
        """
        self.cache.decode(torch.arange(len(tokens), device=self.device), positions, length)
        hidden = torch.arange(length, device=self.device) > positions.unsqueeze(1)
        mask = torch.zeros(hidden.shape, dtype=self.module.dtype, device=self.device).masked_fill_(hidden, self._masked)
        return self._forward(tokens.unsqueeze(1), positions.unsqueeze(1), mask[:, None, None, :])

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        cache = {self._cache_argument: self.cache}
        output = self.module(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=True, **cache)
        return output.logits[:, -1]

    @torch.inference_mode()
    def _probe(self, spec: ModelSpec) -> None:
        """Refuse a model whose logits with the slot cache are not those without: it keeps state elsewhere.

        Two rows of unequal length, padded prefill and one decode, against plain passes.
        """
        contexts = [tuple(i % self.vocab_size for i in range(1, size)) for size in (4, 7)]
        try:
            self.prefill(0, [context[:-1] for context in contexts], [0, 1])
            lengths = [len(context) for context in contexts]
            last = torch.tensor([context[-1] for context in contexts], device=self.device)
            cached = self.decode(last, torch.tensor(lengths, device=self.device) - 1, max(lengths))
            plain = torch.cat(
                [self.module(torch.tensor([context], device=self.device)).logits[:, -1] for context in contexts]
            )
            distance = float((cached - plain).float().norm() / plain.float().norm())
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
            raise WorkerFailed(
                f"the engine 'transformers' cannot run the model in {spec.path!r} ({type(error).__name__}: {error}); "
                "use engine vllm or sglang for it"
            ) from error
        self.forget()
        tolerance = 1e-4 if spec.dtype == "float32" else 5e-2
        if not distance <= tolerance:
            raise WorkerFailed(
                f"the engine 'transformers' cannot run the model in {spec.path!r}: its logits with a KV cache differ "
                f"from those without by {distance:.1g} of their norm; use engine vllm or sglang for it"
            )


def commit(parameters: Mapping[str, Tensor], staged: Mapping[str, Tensor]) -> None:
    """Make the staged tensors the parameters' own; only what is a view of a parameter is copied into.

    Parameters stay the same objects, so that whoever holds one sees the new weights.
    """
    with torch.no_grad():
        for name, tensor in staged.items():
            parameter = parameters[name]
            if isinstance(parameter, nn.Parameter):
                parameter.data = tensor
            else:
                parameter.copy_(tensor)
