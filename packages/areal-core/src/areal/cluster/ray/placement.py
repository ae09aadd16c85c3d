"""Who sits where: room that is reserved for the whole run, and who takes which part of it.

Everybody who asks for resources sits in a bundle of a placement group, also who comes later: Ray queues an actor that
fits nowhere for ever without a word, whereas a group says within a moment that it cannot be had.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from areal.cluster.ray.nodes import Size, how_to_add, in_words, sizes, what_is_there
from areal.contracts.cluster import Room, WorkerSpec
from areal.errors import WorkerFailed

PLACE_DEADLINE_S = 5.0
"""A group that can be had is there within milliseconds; after a node's death Ray needs about a second."""
SHRINK_DEADLINE_S = 1.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Room for one worker. Invariant: `index` is the part of `group` in which it sits, perhaps beside others."""

    kind: str
    place: int
    """Its number among those of its kind; those of one index are neighbours."""
    resources: Size
    group: PlacementGroup
    index: int
    is_reserved: bool
    """Kept for successors, instead of being given back."""

    @property
    def strategy(self) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.index)

    def holds(self, spec: WorkerSpec) -> bool:
        fits = all(amount <= self.resources.get(name, 0) for name, amount in spec.resources.items())
        return self.kind == spec.kind and spec.place in (None, self.place) and fits

    def is_on_a_node(self) -> bool:
        """Whether Ray has a node for it; after a node's death it looks for another by itself."""
        places: Mapping[int, str] = placement_group_table(self.group).get("bundles_to_node_id", {})
        return bool(places.get(self.index))


class Placement:
    """Invariant: a bundle holds at most one living worker, and a dead one's goes to its successor."""

    def __init__(self, reserve_deadline_s: float) -> None:
        self._deadline_s = reserve_deadline_s
        self._free: list[Bundle] = []
        self._taken: dict[str, Bundle] = {}

    async def reserve(self, rooms: Sequence[Room]) -> dict[str, int]:
        """Hold room for all kinds or for none; WorkerFailed when a kind gets fewer than its least."""
        give_up = time.monotonic() + self._deadline_s
        wanted = {room.kind: room for room in rooms if room.resources}
        whole = [_by_node(room) for room in wanted.values()]
        groups: list[tuple[Room, PlacementGroup]] = []
        while not groups:
            fitting = await asyncio.to_thread(_fitting, whole)
            if all(room.count >= room.least for room in fitting):
                groups = await _groups(fitting, give_up)
            if not groups and time.monotonic() > give_up:
                raise WorkerFailed(await asyncio.to_thread(_why_not, whole, self._deadline_s))
            await asyncio.sleep(0 if groups else _POLL_S)
        for room, group in groups:
            parts, together = {room.kind: wanted[room.kind].resources, **room.beside}, wanted[room.kind].together
            self._free += [
                Bundle(kind=kind, place=place, resources=part, group=group, index=place // together, is_reserved=True)
                for place in range(room.count * together)
                for kind, part in parts.items()
            ]
        held = {room.kind: room.count * wanted[room.kind].together for room, _ in groups}
        return {room.kind: room.count for room in rooms} | held

    async def take(self, spec: WorkerSpec) -> PlacementGroupSchedulingStrategy | Literal["DEFAULT"]:
        """Return where a worker goes; WorkerFailed when there is no room within a few seconds."""
        if not spec.resources:
            return "DEFAULT"
        self._taken[spec.name] = bundle = await self._find(spec)
        return bundle.strategy

    def give_back(self, name: str) -> None:
        """The worker has ended: its bundle is free for the next of its kind."""
        bundle = self._taken.pop(name, None)
        if bundle is None:
            return
        if bundle.is_reserved:
            self._free.append(bundle)
        else:
            _remove(bundle.group)

    def close(self) -> None:
        for group in {bundle.group.id: bundle.group for bundle in (*self._free, *self._taken.values())}.values():
            _remove(group)
        self._free, self._taken = [], {}

    async def _find(self, spec: WorkerSpec) -> Bundle:
        give_up = time.monotonic() + PLACE_DEADLINE_S
        while self._may_come(spec):
            for bundle in [bundle for bundle in self._free if bundle.holds(spec)]:
                if await asyncio.to_thread(bundle.is_on_a_node) and bundle in self._free:
                    self._free.remove(bundle)
                    return bundle
            if time.monotonic() > give_up:
                break
            await asyncio.sleep(_POLL_S)
        return await self._ask_outside(spec)

    def _may_come(self, spec: WorkerSpec) -> bool:
        """Whether there is room for one, or soon will be: whoever had the same place before is just being ended."""
        leaving = () if spec.place is None else self._taken.values()
        return any(bundle.holds(spec) and bundle.is_reserved for bundle in (*self._free, *leaving))

    async def _ask_outside(self, spec: WorkerSpec) -> Bundle:
        """Return a bundle of its own for one who finds none reserved; WorkerFailed."""
        room = Room(kind=spec.kind, resources=spec.resources, count=1, least=1)
        groups: list[tuple[Room, PlacementGroup]] = []
        if (await asyncio.to_thread(_fitting, [room]))[0].count:
            groups = await _groups([room], time.monotonic() + PLACE_DEADLINE_S)
        if not groups:
            raise WorkerFailed(await asyncio.to_thread(_no_room, spec.name, spec.resources))
        return Bundle(
            kind=spec.kind, place=-1, resources=spec.resources, group=groups[0][1], index=0, is_reserved=False
        )


def _by_node(room: Room) -> Room:
    """Return the room with those that sit together as one."""
    each = room.together
    return replace(room, resources=room.whole, count=room.count // each, least=room.least // each, together=1)


def fitting(rooms: Sequence[Room], nodes: Sequence[Size]) -> list[Room]:
    """Return the rooms with as many workers as nodes of these sizes hold, the first room first, at most `count`."""
    left = [dict(node) for node in nodes]
    found: list[Room] = []
    for room in rooms:
        num = 0
        for node in left:
            while num < room.count and all(node.get(name, 0) >= amount for name, amount in room.resources.items()):
                for name, amount in room.resources.items():
                    node[name] -= amount
                num += 1
                if room.apart:
                    break
        found.append(replace(room, count=num))
    return found


def _fitting(rooms: Sequence[Room]) -> list[Room]:
    return fitting(rooms, [size for _, size in sizes().values()])


async def _groups(rooms: Sequence[Room], give_up: float) -> list[tuple[Room, PlacementGroup]]:
    """Return a group for each room, or none at all; fewer workers each when others hold what they need."""
    while True:
        left_s = max(SHRINK_DEADLINE_S, give_up - time.monotonic())
        if groups := await asyncio.to_thread(_try_groups, rooms, left_s):
            return groups
        largest = max(rooms, key=lambda room: room.count - room.least)
        if largest.count <= largest.least:
            return []
        rooms = [replace(room, count=room.count - 1) if room is largest else room for room in rooms]


def _try_groups(rooms: Sequence[Room], deadline_s: float) -> list[tuple[Room, PlacementGroup]]:
    give_up = time.monotonic() + deadline_s
    groups: list[tuple[Room, PlacementGroup]] = []
    with suppress(RayError):  # what cannot be had now
        for room in rooms:
            bundles: list[Any] = [dict(room.resources)] * room.count
            groups.append((room, placement_group(bundles, strategy="STRICT_SPREAD" if room.apart else "SPREAD")))
        if all(group.wait(max(0.0, give_up - time.monotonic())) for _, group in groups):
            return groups
    for _, group in groups:
        _remove(group)
    return []


def _remove(group: PlacementGroup) -> None:
    with suppress(RayError):  # the cluster is gone, and the group with it
        remove_placement_group(group)


def _no_room(name: str, resources: Size) -> str:
    return (
        f"{name} needs {in_words(resources)} on one node, and the Ray cluster has {what_is_there(resources)}; "
        f"start a node with it ({how_to_add(resources)}) or change 'resources'"
    )


def _why_not(rooms: Sequence[Room], deadline_s: float) -> str:
    found = _fitting(rooms)
    short = next((room for room, has in zip(rooms, found, strict=True) if has.count < room.least), rooms[0])
    asked = " and ".join(f"{room.least} x {in_words(room.resources)} ({room.kind})" for room in rooms)
    names = {name: 0.0 for room in rooms for name in room.resources}
    return (
        f"the run needs at least {asked}, and within {deadline_s:g} s the Ray cluster had {what_is_there(names)}; "
        f"start a node with it ({how_to_add(short.resources)}) or change 'resources'"
    )
