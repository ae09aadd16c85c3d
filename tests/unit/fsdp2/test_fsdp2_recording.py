"""The order of collectives: the same on every rank, in every run, and whether or not updates overlap."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp2_trainers import BATCHES, Trainer, Trainers, context_of

from areal.builtins.resharders.group import SENDER_RANK, Group
from areal.builtins.resharders.wire import Deadline
from areal.contracts.transfer import Transfer
from areal.errors import ConfigError
from areal.testing.transfer import FOLDER_RESHARDER, FolderOptions, FolderResharder
from areal_fsdp2.backend import Fsdp2Backend
from areal_fsdp2.options import Fsdp2Options
from areal_fsdp2.recording import Collective, OrderFile, collectives

pytestmark = pytest.mark.timeout(300)

Recorded = list[list[Collective]]
"""For each rank what it has begun."""


def recorded(trainer: Trainer, path: Path) -> Recorded:
    """Return the collectives of some updates with all that happens between them."""
    layout, options = trainer.do("layout"), FolderOptions(folder=str(path / "sent"))
    # This resharder takes whole tensors only: they are gathered.
    plan = FolderResharder(options, "").plan(replace(layout, pieces=()), [layout])
    transfer = Transfer(
        phase="stage", version=1, resharder=FOLDER_RESHARDER, options=options, plan=plan, deadline_s=60.0
    )
    starts = [found[-1].place for found in trainer.each("recorded")]
    trainer.do("freeze_reference")
    for batch in BATCHES[:2]:
        trainer.do("logprobs", batch)
        trainer.do("reference_logprobs", batch)
        trainer.steps([batch, BATCHES[2]])
        trainer.do("begin_send", transfer)
        trainer.steps([BATCHES[3]])
        trainer.each("do", "finish_send")
        trainer.do("save", str(path / "saved"))
        trainer.steps([BATCHES[4]])
        trainer.do("finish_save")
    return [
        [collective for collective in found if collective.place > start]
        for start, found in zip(starts, trainer.each("recorded"), strict=True)
    ]


def in_groups(found: list[Collective]) -> dict[str, list[str]]:
    """Return the lines that all ranks of a group must have alike, by group."""
    groups: dict[str, list[str]] = defaultdict(list)
    for collective in found:
        if not collective.is_between_two:
            groups[collective.group].append(str(collective))
    return groups


def anonymous(found: list[Collective], thread: int) -> list[Any]:
    """Return what one thread has begun, in its order; groups are numbered, since a new backend makes one anew."""
    own = [collective for collective in found if collective.thread == thread]
    names = {name: number for number, name in enumerate(dict.fromkeys(collective.group for collective in own))}
    return [(names[c.group], c.name, c.inputs, c.outputs) for c in own]


@pytest.mark.parametrize("options", [{"tp": 2}, {"tp": 2, "sp": 2}, {"pp": 2}], ids=str)
def test_the_order_is_one(four: Trainers, model_path: str, tmp_path: Path, options: dict[str, Any]) -> None:
    orders: list[Any] = []
    for number, overlaps in enumerate((True, True, False)):
        trainer = four.start(model_path, {**options, "overlap_update": overlaps})
        trainer.each("delay", number)
        found = recorded(trainer, tmp_path / str(number))
        threads = trainer.each("threads")
        for rank, own in enumerate(found):
            updates = threads[rank][1]
            assert (updates is not None) == overlaps
            assert updates not in {collective.thread for collective in own}
            assert len(own) < 2000 and own[-1].place - own[0].place == len(own) - 1, "some are not recorded"
            for other in found[:rank]:
                mine, theirs = in_groups(own), in_groups(other)
                shared = mine.keys() & theirs.keys()
                assert shared
                assert [mine[group] for group in shared] == [theirs[group] for group in shared]
        orders.append([anonymous(own, threads[rank][0]) for rank, own in enumerate(found)])
    assert orders[0] == orders[1] == orders[2]


@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2}, {"ep": 2}], ids=str)
def test_two_ranks_write_the_same_lines(
    two: Trainers, model_path: str, moe_path: str, tmp_path: Path, options: dict[str, Any]
) -> None:
    trainer = two.start(moe_path if "ep" in options else model_path, options)
    starts = [found[-1].place for found in trainer.each("recorded")]
    trainer.steps(BATCHES[:2])
    trainer.do("load", str(trainer.save(tmp_path)))
    trainer.steps(BATCHES[2:3])
    mine, theirs = (
        in_groups([collective for collective in found if collective.place > start])
        for start, found in zip(starts, trainer.each("recorded"), strict=True)
    )
    shared = mine.keys() & theirs.keys()
    assert [mine[group] for group in shared] == [theirs[group] for group in shared]
    names = {group.partition(":")[2] for group in (*mine, *theirs)}
    assert "actor_checkpoints" in names
    assert all(name in ("default_pg", "actor_checkpoints") or name.startswith("mesh_") for name in names)


def test_what_differs_by_rank_is_in_no_line() -> None:
    called = Collective(
        place=0, group="g", name="gloo:gather", number=7, is_between_two=False, inputs=((3,),), outputs=(), thread=0
    )
    assert str(called) == "g 7 gloo:gather"
    assert str(replace(called, name="nccl:all_to_all")) == "g 7 nccl:all_to_all"
    assert str(replace(called, name="nccl:all_gather", outputs=((2, 3),))) == "g 7 nccl:all_gather 3 -> 2x3"
    assert str(replace(called, name="nccl:send 0->1", is_between_two=True)) == "g p2p 7 nccl:send 0->1 3 -> -"


def test_a_group_with_the_engines_has_a_name() -> None:
    group = Group("gloo", "127.0.0.1", 0, SENDER_RANK, 1, Deadline(30.0))
    group.join("127.0.0.1")
    group.start(torch.zeros(3, dtype=torch.uint8))
    group.wait()
    assert collectives()[-1].group == f"weights_{group.port}"
    group.drop()


def test_what_fsdp_asks_for_is_seen(two: Trainers, model_path: str) -> None:
    trainer = two.start(model_path, micro_batch_tokens=10_000)
    starts = [found[-1].place for found in trainer.each("recorded")]
    sizes = trainer.each("own_sizes")
    trainer.steps(BATCHES[:1])
    for start, size, found in zip(starts, sizes, trainer.each("recorded"), strict=True):
        root, *others = [c for c in found if c.place > start][:8]
        gathered = [c.inputs for c in (root, *others[:4])]
        assert {c.name for c in (root, *others[:4])} == {"gloo:all_gather"}
        first = root.inputs[0][0]
        layer = (size - first) // 2
        # Two layers forward and back; gloo adds gradients up whole.
        assert gathered == [((first,),), *[((layer,),)] * 4]
        assert [(c.name, c.inputs) for c in others[4:]] == [
            ("gloo:all_reduce", ((2 * part,),)) for part in (layer, layer, first)
        ]


def test_a_file_for_each_rank_tells_it(model_path: str, tmp_path: Path) -> None:
    backend = Fsdp2Backend(Fsdp2Options(record_collectives=str(tmp_path / "order")), context_of(model_path, 1))
    backend.start()
    backend.logprobs(BATCHES[0])
    backend.close()
    (file,) = (tmp_path / "order").glob("actor-rank-0-process-*.txt")
    lines = file.read_text(encoding="utf-8").splitlines()
    assert "gloo:all_gather" in lines[-1]
    assert [thread.name for thread in threading.enumerate() if thread.name == "areal-record"] == []


@pytest.mark.parametrize("name, reason", [("file", "it is a file"), ("file/folder", "Not a directory")])
def test_a_folder_that_cannot_be_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / name
    with pytest.raises(ConfigError) as caught:
        OrderFile(folder, "rank-0")
    assert str(caught.value) == (
        f"backend.record_collectives='{folder}' cannot be written to ({reason}); name a folder that every rank "
        "can make and write to, or leave the option out"
    )
