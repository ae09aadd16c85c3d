"""The KV cache: one slot for each running request, slots 0..n-1 always in use and the rest free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_LENGTH_STEP = 16
"""Slots grow to a multiple of this many tokens, so that a longer request seldom means another copy."""


@dataclass(slots=True)
class Window:
    """The part of the cache that the next forward pass touches. Invariant: one object, seen by all layers.

    With `positions` None the pass is a prefill: its keys go to slots `start`..`stop`-1 from position 0 on, row
    `source[i]` of the pass to slot `start + i`. Otherwise it is a decode of slots 0..`stop`-1, one token each.
    """

    start: int = 0
    stop: int = 0
    length: int = 0
    """Positions that the pass reads: 0..length-1."""
    source: Tensor | None = None
    """[stop - start] int64; None: row i belongs to slot start + i."""
    rows: Tensor | None = None
    """[stop] int64, 0..stop-1."""
    positions: Tensor | None = None
    """[stop] int64, where each row's new token stands."""
    capacity: tuple[int, int] = (0, 0)
    """(slots, tokens) that every layer has room for."""


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [slots, kv_heads, tokens, head_dim]. Invariant: every element is finite.

    Positions after a row's own are masked, but a masked NaN would still be a NaN: new memory is zero.
    """

    is_sliding = False
    is_compileable = False

    def __init__(self, window: Window) -> None:
        super().__init__()
        self._window = window
        self._keys = self._values = torch.empty(0)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        slots, tokens = self._window.capacity
        self._keys = key_states.new_zeros(slots, key_states.shape[1], tokens, key_states.shape[3])
        self._values = value_states.new_zeros(slots, value_states.shape[1], tokens, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store [rows, kv_heads, T, head_dim] and return what the pass attends to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self._window
        if window.positions is None:
            self._store_prompts(self._keys, key_states)
            self._store_prompts(self._values, value_states)
            return key_states, value_states
        self._keys[window.rows, :, window.positions] = key_states[:, :, 0]
        self._values[window.rows, :, window.positions] = value_states[:, :, 0]
        return self._keys[: window.stop, :, : window.length], self._values[: window.stop, :, : window.length]

    def _store_prompts(self, cache: Tensor, states: Tensor) -> None:
        window = self._window
        rows = states if window.source is None else states[window.source]
        cache[window.start : window.stop, :, : window.length] = rows

    def resize(self, slots: int, tokens: int, used_slots: int, used_tokens: int) -> None:
        """Move the used corner into memory of another size."""
        if self.is_initialized:
            self._keys = _resized(self._keys, slots, tokens, used_slots, used_tokens)
            self._values = _resized(self._values, slots, tokens, used_slots, used_tokens)

    def to(self, device: str) -> None:
        self._keys, self._values = self._keys.to(device), self._values.to(device)

    @property
    def device(self) -> torch.device:
        return self._keys.device

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        self._keys[target, :, :length] = self._keys[source, :, :length]
        self._values[target, :, :length] = self._values[source, :, :length]

    def get_seq_length(self) -> int:
        return 0 if self._window.positions is None else self._window.length - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._window.length, 0

    def get_max_length(self) -> int:
        return -1

    # The same question under the name that transformers before 5.2x asks it.
    get_max_cache_shape = get_max_length


class SlotCache(Cache):
    """Invariant: between passes slots 0..n-1 are the running rows', and memory is `max_kv_tokens` or what they need.

    The layers are made as the model's first pass meets them, in the shapes the model itself produces, so that any
    number of key and value heads and any head size works.
    """

    def __init__(self, max_slots: int, max_tokens: int, max_kv_tokens: int) -> None:
        self.window = Window()
        self._max_slots = max_slots
        self._max_tokens = max_tokens
        self._max_kv_tokens = max_kv_tokens
        self._used_tokens = 0
        """No running row is longer."""
        self._slot_layers: list[SlotLayer] = []
        # transformers calls this for each layer it has not met yet; it need not be a class.
        super().__init__(layer_class_to_replicate=self._new_layer)  # pyright: ignore[reportArgumentType]

    def _new_layer(self) -> SlotLayer:
        layer = SlotLayer(self.window)
        self._slot_layers.append(layer)
        return layer

    def prefill(self, start: int, stop: int, length: int, source: Tensor | None) -> None:
        """Announce a prefill of the first free slots, `start`..`stop`-1, with prompts padded to `length` tokens."""
        self._used_tokens = max(self._used_tokens, length) if start else length
        self._reserve(stop, used_slots=start)
        window = self.window
        window.start, window.stop, window.length = start, stop, length
        window.source, window.rows, window.positions = source, None, None

    def decode(self, rows: Tensor, positions: Tensor, length: int) -> None:
        """Announce a decode of slots 0..n-1 whose new tokens stand at `positions` ([n] int64), all below `length`."""
        self._used_tokens = length
        self._reserve(len(rows), used_slots=len(rows))
        window = self.window
        window.start, window.stop, window.length = 0, len(rows), length
        window.source, window.rows, window.positions = None, rows, positions

    def to(self, device: str) -> None:
        """Move all keys and values to a device."""
        # The last pass's own tensors; the next one brings new ones.
        self.window.source = self.window.rows = self.window.positions = None
        for layer in self._slot_layers:
            layer.to(device)

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy slots (source, target); sources and targets are disjoint."""
        if not moves or not self._slot_layers:
            return
        source, target = torch.tensor(moves, device=self._slot_layers[0].device).unbind(1)
        for layer in self._slot_layers:
            layer.move(source, target, self._used_tokens)

    def _reserve(self, slots: int, used_slots: int) -> None:
        old_slots, old_tokens = self.window.capacity
        tokens = self._used_tokens
        if slots <= old_slots and tokens <= old_tokens:
            return
        new_slots = old_slots if slots <= old_slots else max(slots, min(2 * old_slots, self._max_slots))
        rounded = -(-tokens // _LENGTH_STEP) * _LENGTH_STEP
        new_tokens = max(tokens, min(max(rounded, old_tokens * 3 // 2), self._max_tokens))
        new_tokens = old_tokens if tokens <= old_tokens else new_tokens
        if new_slots * new_tokens > self._max_kv_tokens:
            new_slots, new_tokens = slots, min(rounded, self._max_tokens)
        for layer in self._slot_layers:
            layer.resize(new_slots, new_tokens, used_slots, min(tokens, old_tokens))
        self.window.capacity = (new_slots, new_tokens)


def _resized(old: Tensor, slots: int, tokens: int, used_slots: int, used_tokens: int) -> Tensor:
    new = old.new_zeros(slots, old.shape[1], tokens, old.shape[3])
    new[:used_slots, :, :used_tokens] = old[:used_slots, :, :used_tokens]
    return new
