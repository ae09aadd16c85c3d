"""Was anything lost, or used twice? An auditor of a run's journal that shares no line with what wrote it.

    python benchmarks/measuring/audit.py RUN_FOLDER [--snapshot FILE]

Reads `journal.sqlite` (schema 1 or 2) with nothing but sqlite3, while the run is going on, ended or killed, and prints
how many things are lost, twice and missing; the exit code is 1 when any is, 2 when the journal cannot be read.

lost      group numbers that were never issued, consumed groups that were never issued, and what an earlier snapshot saw
          and is no longer there: trajectories, and groups trained by a step that a checkpoint had sealed
twice     groups issued, samples made or groups consumed more than once, samples that nobody asked for
missing   samples of consumed groups, training steps, groups of a training step's batch

With --snapshot, the present state is compared with FILE, if it is there, and then added to it: give the same FILE after
every kill. A sample that the run itself set aside as damaged (table `damaged`) is counted for itself.
"""

from __future__ import annotations

import argparse
import json
import re
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EXAMPLES = 5


@dataclass
class Findings:
    """Invariant: `counts` has an entry for each kind of fault, 0 where there is none."""

    counts: Counter[str] = field(default_factory=lambda: Counter(lost=0, twice=0, missing=0))
    lines: list[str] = field(default_factory=list)

    def add(self, kind: str, what: str, cases: Iterable[object]) -> None:
        found = list(cases)
        if found:
            self.counts[kind] += len(found)
            examples = ", ".join(map(str, found[:EXAMPLES])) + (", ..." if len(found) > EXAMPLES else "")
            self.lines.append(f"{kind}: {what}: {len(found)} ({examples})")


@dataclass
class State:
    """What the journal says at one moment. Invariant: read in one transaction."""

    groups: list[tuple[int, int]]
    """(number, samples asked for)"""
    samples: list[tuple[int, int, str]]
    """(group, sample, what never changes about it)"""
    consumed: list[tuple[int, int, str]]
    """(group, step, fate)"""
    steps: list[int]
    sealed: int
    """Step of the newest checkpoint."""
    set_aside: set[tuple[int, int]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--snapshot", type=Path, help="what earlier audits of this run saw")
    parser.add_argument("--batch-size", type=int, help="groups of a training step; else what config.yaml says")
    args = parser.parse_args()
    try:
        state = read(args.run / "journal.sqlite")
        batch_size = args.batch_size or configured_batch_size(args.run / "config.yaml")
        seen = json.loads(args.snapshot.read_text()) if args.snapshot and args.snapshot.exists() else {}
    except (sqlite3.Error, OSError, ValueError) as error:
        print(f"cannot be audited: {error}", file=sys.stderr)
        return 2
    findings = audit(state, batch_size)
    compare(state, seen, findings)
    if args.snapshot:
        save(snapshot(state, seen), args.snapshot)
    for line in findings.lines:
        print(line)
    print(
        f"{len(state.groups)} groups, {len(state.samples)} samples, {len(state.consumed)} groups consumed, "
        f"{len(state.steps)} steps, newest checkpoint {state.sealed}, {len(state.set_aside)} samples set aside"
    )
    print(", ".join(f"{kind} {findings.counts[kind]}" for kind in ("lost", "twice", "missing")))
    return 1 if findings.counts.total() else 0


def read(path: Path) -> State:
    db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None, timeout=30)
    try:
        (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise ValueError(f"{path} is damaged: {found}")
        db.execute("BEGIN")
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        # The tokens may go when the journal is compacted; who made what, and when, stays.
        samples = db.execute("SELECT group_number, sample, status, reward, num_tokens, finished_at FROM trajectories")
        aside = (
            set(db.execute("SELECT group_number, sample FROM damaged WHERE sample IS NOT NULL"))
            if "damaged" in tables
            else set()
        )
        return State(
            groups=db.execute("SELECT number, num_samples FROM groups").fetchall(),
            samples=[(group, sample, repr(rest)) for group, sample, *rest in samples],
            consumed=db.execute("SELECT group_number, step, fate FROM consumed").fetchall(),
            steps=[step for (step,) in db.execute("SELECT step FROM steps")],
            sealed=db.execute("SELECT coalesce(max(step), 0) FROM checkpoints").fetchone()[0],
            set_aside=aside,
        )
    finally:
        db.close()


def configured_batch_size(config: Path) -> int:
    """Return `training.batch_size` of a run's config.yaml, which has every value on a line of its own."""
    block = re.search(r"^training:\n((?:[ ]+.*\n)+)", config.read_text(encoding="utf-8"), re.MULTILINE)
    found = re.search(r"^ +batch_size: *(\d+)\s*$", block[1], re.MULTILINE) if block else None
    if found is None:
        raise ValueError(f"{config} does not say training.batch_size; give --batch-size")
    return int(found[1])


def audit(state: State, batch_size: int) -> Findings:
    findings = Findings()
    numbers = Counter(number for number, _ in state.groups)
    made_for = {group for group, _, _ in state.samples}
    last = max([*numbers, *made_for], default=-1)
    findings.add("lost", "groups never issued", [number for number in range(last + 1) if number not in numbers])
    findings.add("twice", "groups issued again", repeated(numbers))
    samples = Counter((group, sample) for group, sample, _ in state.samples)
    findings.add("twice", "samples made again", repeated(samples))
    asked = dict(state.groups)
    surplus = [pair for pair in samples if pair[0] in asked and not 0 <= pair[1] < asked[pair[0]]]
    findings.add("twice", "samples that nobody asked for", surplus)
    consumed = Counter(group for group, _, _ in state.consumed)
    findings.add("twice", "groups consumed again", repeated(consumed))
    findings.add("lost", "consumed groups never issued", sorted(consumed.keys() - numbers.keys()))
    gaps = [(group, i) for group in sorted(consumed) for i in range(asked.get(group, 0)) if (group, i) not in samples]
    findings.add("missing", "samples of consumed groups", gaps)
    check_steps(state, batch_size, findings)
    return findings


def check_steps(state: State, batch_size: int, findings: Findings) -> None:
    steps = Counter(state.steps)
    trained = Counter(step for _, step, fate in state.consumed if fate == "trained")
    last = max([*steps, *trained], default=0)
    findings.add("missing", "training steps", [step for step in range(1, last + 1) if step not in steps])
    findings.add("twice", "training steps", repeated(steps))
    short = [step for step in sorted(steps) if trained[step] < batch_size]
    findings.add("missing", "groups of steps", [(step, i) for step in short for i in range(trained[step], batch_size)])
    more = [step for step in sorted(steps) if trained[step] > batch_size]
    findings.add("twice", "groups beyond a step's batch", more)


def compare(state: State, seen: dict[str, Any], findings: Findings) -> None:
    """Find what an earlier snapshot saw and is gone, or is another now."""
    now = {f"{group}/{sample}": what for group, sample, what in state.samples}
    aside = {f"{group}/{sample}" for group, sample in state.set_aside}
    gone = [uid for uid, what in seen.get("samples", {}).items() if now.get(uid) != what and uid not in aside]
    findings.add("lost", "samples that a snapshot saw", gone)
    trained = {str(group): [step, fate] for group, step, fate in state.consumed}
    other = [group for group, step in seen.get("sealed", {}).items() if trained.get(group) != step]
    findings.add("lost", "groups consumed before a checkpoint that a snapshot saw", other)
    issued = {str(number): size for number, size in state.groups}
    forgotten = [number for number, size in seen.get("groups", {}).items() if issued.get(number) != size]
    findings.add("lost", "groups that a snapshot saw", forgotten)


def snapshot(state: State, seen: dict[str, Any]) -> dict[str, Any]:
    """Return what is there now, and all that was there before."""
    aside = {f"{group}/{sample}" for group, sample in state.set_aside}
    before = {uid: what for uid, what in seen.get("samples", {}).items() if uid not in aside}
    now = {f"{group}/{sample}": what for group, sample, what in state.samples}
    sealed = {str(group): [step, fate] for group, step, fate in state.consumed if step <= state.sealed}
    return {
        "samples": now | before,
        "sealed": sealed | seen.get("sealed", {}),
        "groups": {str(number): size for number, size in state.groups} | seen.get("groups", {}),
    }


def save(content: dict[str, Any], path: Path) -> None:
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_text(json.dumps(content))
    unfinished.replace(path)


def repeated(counted: Counter[Any]) -> list[Any]:
    return sorted(thing for thing, times in counted.items() if times > 1)


if __name__ == "__main__":
    sys.exit(main())
