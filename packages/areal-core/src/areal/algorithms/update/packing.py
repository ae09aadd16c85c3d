"""Packing: the rows of a micro-batch become one sequence without padding, in which shared prefixes stand once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from areal.algorithms.update.attention import RowGroups
from areal.contracts.messages import Row


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """R rows as a prefix tree of T nodes: one node for each different prefix of any row.

    What a causal model computes for a token depends on the tokens before it only, so rows that begin alike (the
    samples of one prompt) share that work. A row's tokens after the last one that predicts a trained token are left
    out. Invariant: a node's parent comes before it, and every row is a path from a root.
    """

    rows: tuple[int, ...]
    """[R] positions in the sequence of rows that was packed."""
    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, depth in the tree: the token's position in its row."""
    groups: RowGroups
    """Which nodes make each row, for the attention."""
    predictors: Tensor
    """[P] int64, ascending: the nodes that predict trained tokens."""
    predictor: Tensor
    """[N] int64, index into `predictors`, for each trained token, row after row."""
    targets: Tensor
    """[N] int64, the trained tokens."""
    sequence: Tensor
    """[N] int64, 0..R-1, ascending."""


def micro_batches(rows: Sequence[Row], budget: int, *, whole_groups: bool = False) -> list[list[int]]:
    """Split rows into micro-batches of at most `budget` tokens and return their positions.

    Rows without trained tokens are left out. Rows that begin alike come together; their shared tokens count in
    every row. A row is never split, and with `whole_groups` neither are the rows of a group: one above the budget
    is alone.
    """
    return fill(units(rows, whole_groups=whole_groups), budget)


def units(rows: Sequence[Row], *, whole_groups: bool = False) -> list[tuple[list[int], int]]:
    """Return what is never split, rows or groups of them: their positions and tokens; `micro_batches` says the rest."""
    lengths = [_num_inputs(row) for row in rows]
    order = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: rows[i].token_ids)
    members: dict[int, list[int]] = defaultdict(list)
    for i in order:
        members[rows[i].group if whole_groups else i].append(i)
    return [(unit, sum(lengths[i] for i in unit)) for unit in members.values()]


def fill(loads: Sequence[tuple[Sequence[int], int]], budget: int) -> list[list[int]]:
    """Put units (positions, tokens) into micro-batches in their order, a new one when the budget would be exceeded."""
    batches: list[list[int]] = []
    used = budget
    for unit, length in loads:
        if used + length > budget:
            batches.append([])
            used = 0
        batches[-1] += unit
        used += length
    return batches


def pack(rows: Sequence[Row], chosen: Sequence[int], device: torch.device) -> Packed:
    """Pack the rows at the positions `chosen`, each with at least one trained token."""
    tree = _Tree()
    paths = [tree.add(rows[i].token_ids[: _num_inputs(rows[i])]) for i in chosen]
    targets: list[int] = []
    nodes: list[int] = []
    sequence: list[int] = []
    for number, (i, path) in enumerate(zip(chosen, paths, strict=True)):
        trained = [t for t, is_trained in enumerate(rows[i].loss_mask) if is_trained]
        targets += [rows[i].token_ids[t] for t in trained]
        nodes += [path[t - 1] for t in trained]
        sequence += [number] * len(trained)
    predictors = sorted(set(nodes))
    number_of = {node: number for number, node in enumerate(predictors)}

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return Packed(
        rows=tuple(chosen),
        token_ids=tensor(tree.tokens),
        positions=tensor(tree.depths),
        groups=_group(paths, tree.owners, tree.depths, device),
        predictors=tensor(predictors),
        predictor=tensor([number_of[node] for node in nodes]),
        targets=tensor(targets),
        sequence=tensor(sequence),
    )


class _Tree:
    """A prefix tree in the order in which its nodes were made. Invariant: all lists have one entry a node."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.depths: list[int] = []
        self.owners: list[int] = []
        """Number of the first row that passes through the node."""
        self._children: dict[tuple[int, int], int] = {}
        self._num_rows = 0

    def add(self, token_ids: Sequence[int]) -> list[int]:
        """Add a row and return its path, one node a token."""
        path: list[int] = []
        parent = -1
        for depth, token in enumerate(token_ids):
            parent = self._children.setdefault((parent, token), len(self.tokens))
            if parent == len(self.tokens):
                self.tokens.append(token)
                self.depths.append(depth)
                self.owners.append(self._num_rows)
            path.append(parent)
        self._num_rows += 1
        return path


def _group(paths: list[list[int]], owners: list[int], depths: list[int], device: torch.device) -> RowGroups:
    """Group rows of similar length; a shorter one is filled up with its last node, which no earlier token sees."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for number, path in enumerate(paths):
        by_length[_rounded(len(path))].append(number)
    indices: list[Tensor] = []
    starts = [0] * len(paths)
    offset = 0
    for members in by_length.values():
        length = max(len(paths[number]) for number in members)
        for number in members:
            starts[number] = offset
            offset += length
        filled = [paths[number] + paths[number][-1:] * (length - len(paths[number])) for number in members]
        indices.append(torch.tensor(filled, dtype=torch.int64, device=device))
    first = [starts[owner] + depth for owner, depth in zip(owners, depths, strict=True)]
    return RowGroups(indices=tuple(indices), first=torch.tensor(first, dtype=torch.int64, device=device))


def _rounded(length: int) -> int:
    """Round up to one of eight lengths an octave: few groups, at most an eighth of the attention for nothing."""
    step = max(1, (1 << length.bit_length()) // 16)
    return -(-length // step) * step


def _num_inputs(row: Row) -> int:
    """Return how many of the row's tokens must be computed: those before its last trained token."""
    return len(row.loss_mask) - 1 - row.loss_mask[::-1].index(True) if True in row.loss_mask else 0
