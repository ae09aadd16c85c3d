"""The models of weight_sync.py: names and shapes as published, random values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from areal.contracts.transfer import Layout, Piece, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A dense causal LM with a tied LM head. Invariant: `specs` are all its parameters."""

    hidden: int
    feed_forward: int
    num_layers: int
    num_heads: int
    num_key_heads: int
    head_dim: int
    vocab_size: int
    has_head_norms: bool

    def specs(self) -> tuple[TensorSpec, ...]:
        """Return the parameters by HF name, float32 as the trainer's master weights are."""
        queries, keys = self.num_heads * self.head_dim, self.num_key_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (queries, self.hidden),
            "self_attn.k_proj": (keys, self.hidden),
            "self_attn.v_proj": (keys, self.hidden),
            "self_attn.o_proj": (self.hidden, queries),
            "mlp.gate_proj": (self.feed_forward, self.hidden),
            "mlp.up_proj": (self.feed_forward, self.hidden),
            "mlp.down_proj": (self.hidden, self.feed_forward),
            "input_layernorm": (self.hidden,),
            "post_attention_layernorm": (self.hidden,),
        }
        if self.has_head_norms:
            layer |= {"self_attn.q_norm": (self.head_dim,), "self_attn.k_norm": (self.head_dim,)}
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, self.hidden)}
        for index in range(self.num_layers):
            shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (self.hidden,)
        return tuple(TensorSpec(name=name, shape=shape, dtype="float32") for name, shape in shapes.items())


SIZES: Mapping[str, Shape] = {
    # SmolLM2-135M
    "135M": Shape(
        hidden=576, feed_forward=1536, num_layers=30, num_heads=9, num_key_heads=3, head_dim=64, vocab_size=49152,
        has_head_norms=False,
    ),
    # Qwen3-0.6B and Qwen3-1.7B
    "0.6B": Shape(
        hidden=1024, feed_forward=3072, num_layers=28, num_heads=16, num_key_heads=8, head_dim=128, vocab_size=151936,
        has_head_norms=True,
    ),
    "1.7B": Shape(
        hidden=2048, feed_forward=6144, num_layers=28, num_heads=16, num_key_heads=8, head_dim=128, vocab_size=151936,
        has_head_norms=True,
    ),
    # For a look whether the script works.
    "tiny": Shape(
        hidden=64, feed_forward=128, num_layers=2, num_heads=4, num_key_heads=2, head_dim=16, vocab_size=1000,
        has_head_norms=True,
    ),
}  # fmt: skip


def rows_of(spec: TensorSpec, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the first row and the number of rows that FSDP2 gives a rank: chunks of equal size, the last shorter."""
    chunk = -(-spec.shape[0] // num_ranks)
    first = min(rank * chunk, spec.shape[0])
    return first, min(chunk, spec.shape[0] - first)


def source_of(specs: tuple[TensorSpec, ...], num_ranks: int) -> Layout:
    """Return the layout of a trainer whose parameters are sharded by rows."""
    pieces: list[tuple[Piece, ...]] = []
    for rank in range(num_ranks):
        rows = [rows_of(spec, rank, num_ranks) for spec in specs]
        pieces.append(
            tuple(
                Piece(tensor=index, start=(first, *[0] * (len(spec.shape) - 1)), shape=(count, *spec.shape[1:]))
                for index, (spec, (first, count)) in enumerate(zip(specs, rows, strict=True))
                if count
            )
        )
    return Layout(host="here", num_ranks=num_ranks, tensors=specs, pieces=tuple(pieces))
