"""Kill everything, again and again: does a run lose, repeat or forget anything, and does it still learn?

    python benchmarks/chaos.py [--kills 200] [--seed 1] [--bar 0.9] [--out FILE] [KEY.SUB=VALUE ...]

`areal run` on the tiny task with 2 engines and 2 rollout workers, half of the prompts scored in a child process. At
random moments SIGKILL ends, in random order, an engine, a rollout worker, the trainer, the controller (then `areal
resume` goes on), a scoring process or Ray's node; SIGSTOP freezes an engine or a rollout worker for good; `areal
workers` adds and removes some. Each next blow falls after 1 to --spacing steps that the run has never had before, so
that it advances however far a blow sets it back; three in ten follow the one before within 3 s instead. After each,
`measuring/audit.py` compares the journal with all that earlier snapshots saw.

At last the controller is killed once more, and the resumed run is left alone for --calm steps, to its last one. The
exit code is 1 when anything was lost, used twice or is missing, when the run did not go on or end by itself, when a
process outlived its controller, or when the mean reward of the last 20 steps is below --bar.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
from measuring.live_run import LiveRun
from measuring.processes import ROOT, new_folder, tail

RECIPE = (
    "name=chaos",
    "environments=[{name: reverse, type: reverse_digits}, {name: slow, type: 'measuring.scored:SlowDigits'}]",
    "engine.replicas=2",
    "rollout.workers=2",
    "training.batch_size=32",
    "training.schedule=constant",
    "training.max_steps=1000000",
    "checkpoint.every_steps=3",
    "evaluation.every_steps=0",
    "trackers=[jsonl]",
    "failures.max_restarts=100000",
    "failures.backoff_s=0.1",
    "failures.hang_timeout_s=5",
    "failures.quiet_time_s=90",
    "rollout.episode_timeout_s=60",
)
WEIGHTS = {
    "engine": 20, "rollout": 18, "trainer": 9, "scorer": 14, "controller": 3, "node": 1,
    "stopped engine": 5, "stopped rollout": 5, "added": 3, "removed": 3,
}  # fmt: skip
"""How often each kind of blow falls, relative to the others."""
SETTLING = ("added", "removed")
"""Blows that kill nobody and do not count as kills."""
AT_ONCE = 0.3
AT_ONCE_S = 3.0
NO_STEP_S = 300.0
"""Longest time without a new step."""
DIES_S = 60.0
"""For the controller to end by itself after Ray's node died."""
RAY_IS_LATE = "Ray could not be started on this machine"
MOST_LATE = 5
WINDOW = 20
COUNTERS = ("rollout/reissued_groups", "engine/recalled_total", "workers/lost")


class Broken(Exception):
    """The run did not do what it promises. Invariant: says what, in one sentence."""


@dataclass
class Tally:
    """What happened. Invariant: counters of a controller or an engine that is gone keep what it had counted."""

    blows: Counter[str] = field(default_factory=Counter[str])
    totals: Counter[str] = field(default_factory=Counter[str])
    now: dict[str, float] = field(default_factory=dict[str, float])
    broken: list[str] = field(default_factory=list[str])
    snapshots: int = 0
    late: int = 0
    """Resumes that ended because Ray did not start."""
    audit: str = ""

    @property
    def kills(self) -> int:
        return sum(number for kind, number in self.blows.items() if kind not in SETTLING)

    def count(self, metrics: dict[str, float]) -> None:
        """Add what counters have grown by since the last look; one that fell has begun anew."""
        for name, value in metrics.items():
            before = self.now.get(name, 0.0)
            self.totals[name] += round(value - before if value >= before else value)
        self.now |= metrics


class Chaos:
    """One run and who disturbs it. Invariant: whatever is stopped is found dead later, or reported."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.rng = random.Random(args.seed)
        end = [] if args.kills or args.order else [f"training.max_steps={args.calm}"]
        self.run = LiveRun(folder, [*RECIPE, *end, f"seed={args.seed}", *args.override])
        self.tally = Tally()
        self.snapshot = folder / "snapshot.json"
        self.order: list[str] = [kind for kind in args.order.split(",") if kind]
        self.stopped: set[int] = set()
        self.known: dict[int, psutil.Process] = {}
        self.furthest = 0
        self.blow_of: dict[str, Callable[[], str]] = {
            "engine": lambda: self._signal_worker("engine", signal.SIGKILL),
            "rollout": lambda: self._signal_worker("rollout", signal.SIGKILL),
            "trainer": lambda: self._signal_worker("trainer", signal.SIGKILL),
            "stopped engine": lambda: self._signal_worker("engine", signal.SIGSTOP),
            "stopped rollout": lambda: self._signal_worker("rollout", signal.SIGSTOP),
            "scorer": self._kill_scorer,
            "controller": self._kill_controller,
            "node": self._kill_node,
            "added": self._add,
            "removed": self._remove,
        }

    def go(self) -> None:
        """Start, disturb, leave alone. Raises Broken."""
        self.run.start()
        self._wait(lambda: self.run.last_step() >= 1, "its first step")
        while self._goes_on:
            self._pause()
            self._strike()
            self.audit()
        if self.tally.blows:
            end = self.run.last_step() + self.args.calm
            whom = self._kill_controller(end)
            self.tally.blows["controller"] += 1
            self.say("controller", f"{whom}; the last one, on to step {end}")
        self._wait(lambda: self.run.code == 0, "the end", may_end=True)

    @property
    def _goes_on(self) -> bool:
        """Whether another blow is to fall; the controller's last end will be a kill, too."""
        if self.args.order:
            return bool(self.order)
        is_time_left = time.monotonic() - BEGAN < 60 * self.args.minutes
        return self.tally.kills < self.args.kills - 1 and is_time_left

    def note(self, sentence: str) -> None:
        self.tally.broken.append(sentence)
        print(f"BROKEN: {sentence}", flush=True)

    def say(self, kind: str, what: str) -> None:
        at = f"{time.monotonic() - BEGAN:7.1f} s, step {self.run.last_step():5d}, {self.tally.kills:3d} kills"
        print(f"{at}: {kind}: {what}", flush=True)

    # when

    def _pause(self) -> None:
        if self.tally.blows and self.rng.random() < AT_ONCE:
            time.sleep(self.rng.uniform(0, AT_ONCE_S))
            return
        aim = self.furthest + self.rng.randint(1, self.args.spacing)
        self._wait(lambda: self.run.last_step() >= aim, f"step {aim}")
        time.sleep(self.rng.uniform(0, 0.5))

    def _wait(self, done: Callable[[], bool], for_what: str, *, may_end: bool = False) -> None:
        """Look until it is so. Raises Broken when the run ends meanwhile, or has no step it never had for long."""
        progress = time.monotonic()
        while not done():
            self.tally.count(self.run.newest_metrics(*COUNTERS))
            step = self.run.last_step()
            if step > self.furthest:
                self.furthest, progress = step, time.monotonic()
            if self.run.code is not None and not (may_end and self.run.code == 0):
                self._start_again(for_what)
            if time.monotonic() - progress > NO_STEP_S:
                raise Broken(f"no step beyond {self.furthest} for {NO_STEP_S:g} s, before {for_what}")
            time.sleep(0.1)
        self.furthest = max(self.furthest, self.run.last_step())

    def _start_again(self, for_what: str) -> None:
        """Resume a run that ended because Ray did not start in time on a busy machine; Broken for any other end."""
        said = tail(self.run.log)
        if RAY_IS_LATE not in said.splitlines()[-1] or self.tally.late == MOST_LATE or not self.run.has_begun:
            raise Broken(f"the run ended by itself with {self.run.code}, before {for_what}:\n{said}")
        self.tally.late += 1
        self.say("resume", said.splitlines()[-1])
        self.run.resume()

    # what

    def _strike(self) -> None:
        """Let one blow fall; of a kind that is there."""
        while True:
            kind = self.order[0] if self.order else self.rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            with suppress(psutil.NoSuchProcess):
                if whom := self.blow_of[kind]():
                    self.tally.blows[kind] += 1
                    del self.order[:1]
                    return self.say(kind, whom)
            if self.run.code is not None:
                self._start_again("a blow")
            time.sleep(0.2)

    def _signal_worker(self, kind: str, number: signal.Signals) -> str:
        """Signal one worker of the kind; return its name, or an empty string when there is none."""
        there = {
            name: process
            for name, process in self.run.workers().items()
            if name.startswith(kind) and process.pid not in self.stopped
        }
        if not there:
            return ""
        name = self.rng.choice(sorted(there))
        there[name].send_signal(number)
        if number == signal.SIGSTOP:
            self.stopped.add(there[name].pid)
        return name

    def _kill_scorer(self) -> str:
        there = self.run.scorers()
        if not there:
            return ""
        process = self.rng.choice(there)
        process.kill()
        return f"process {process.pid}"

    def _kill_controller(self, max_steps: int | None = None) -> str:
        controller = self.run.controller
        known = self.run.everybody()
        controller.kill()
        self.run.wait(30.0)
        return self._resume(known, f"process {controller.pid}", max_steps)

    def _kill_node(self) -> str:
        nodes, known = self.run.nodes(), self.run.everybody()
        if not nodes:
            return ""
        nodes[0].kill()
        give_up = time.monotonic() + DIES_S
        while (code := self.run.wait(1.0)) is None and time.monotonic() < give_up:
            if [node for node in self.run.nodes() if node.pid != nodes[0].pid]:
                return f"process {nodes[0].pid}, which had not been ready; the controller has started another"
        if code is None:
            self.note(f"the controller lived on for {DIES_S:g} s after Ray's node had died")
            self.run.controller.kill()
            self.run.wait(30.0)
        return self._resume(known, f"process {nodes[0].pid}, and the controller ended with {code}")

    def _resume(self, known: dict[int, psutil.Process], whom: str, max_steps: int | None = None) -> str:
        """Go on with the run once everything that belonged to the dead controller is gone."""
        began = time.monotonic()
        self.known |= known
        if left := self.run.left_behind(known):
            self.note(f"outlived their controller: {'; '.join(left)}")
        gone_s = time.monotonic() - began
        self.stopped.clear()
        self.run.resume(max_steps)
        return f"{whom}; the rest of it was gone after {gone_s:.1f} s"

    def _add(self) -> str:
        kind = self.rng.choice(["engine", "rollout"])
        if sum(name.startswith(kind) for name in self.run.workers()) >= 3:
            return ""
        return self._said(self.run.workers_command("add", kind, deadline_s=90.0))

    def _remove(self) -> str:
        kind = self.rng.choice(["engine", "rollout"])
        there = [name for name in self.run.workers() if name.startswith(kind)]
        return self._said(self.run.workers_command("remove", self.rng.choice(there), deadline_s=90.0)) if there else ""

    def _said(self, answer: str) -> str:
        if "Traceback" in answer or "no answer" in answer:
            self.note(f"areal workers: {answer}")
        said = " ".join(answer.split())[:200]
        if "has started" in said or "has left" in said:
            return said
        print(f"areal workers said: {said}", flush=True)
        return ""

    # the result

    def audit(self) -> None:
        """Compare with all earlier snapshots, in a process of its own."""
        command = [sys.executable, str(ROOT / "benchmarks/measuring/audit.py"), str(self.run.path)]
        done = subprocess.run(
            [*command, "--snapshot", str(self.snapshot)], capture_output=True, text=True, timeout=300, check=False
        )
        if done.returncode == 2 and not self.run.has_begun:
            return
        self.tally.snapshots += 1
        self.tally.audit = done.stdout.strip() or done.stderr.strip()
        if done.returncode:
            self.note(f"audit: {self.tally.audit}")

    def result(self, seconds: float) -> dict[str, Any]:
        tally, rewards = self.tally, self.run.rewards()
        restarts = self.run.ask("SELECT count(*) FROM failures")[0][0]
        last = tally.audit.splitlines()[-1]
        return {
            "kills": tally.kills,
            "blows by kind": dict(sorted(tally.blows.items())),
            "audit": last,
            "snapshots": tally.snapshots,
            "samples": self.run.num_samples(),
            "steps": self.run.last_step(),
            "reward, first 20 steps": round(fmean(rewards[:WINDOW] or [0.0]), 3),
            "reward, last 20 steps": round(fmean(rewards[-WINDOW:] or [0.0]), 3),
            "seconds": round(seconds),
            "resumes": self.run.num_resumes,
            "resumes for which Ray did not start": tally.late,
            "workers lost (journal)": restarts,
            "reissued groups, at least": tally.totals["rollout/reissued_groups"],
            "recalled answers, at least": tally.totals["engine/recalled_total"],
            "broken": tally.broken,
        }


def told_to_stop(number: int, frame: object) -> None:
    raise Broken("it was told to stop before its end")


BEGAN = time.monotonic()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="processes killed or stopped; 0: undisturbed")
    parser.add_argument("--minutes", type=float, default=600.0, help="after which no more blows fall")
    parser.add_argument("--order", default="", help="these blows instead, in this order: KIND,KIND,...")
    parser.add_argument("--seed", type=int, default=1, help="decides who is hit when, as far as the run repeats")
    parser.add_argument("--spacing", type=int, default=4, help="most new steps between two blows")
    parser.add_argument("--calm", type=int, default=150, help="steps after the last kill")
    parser.add_argument("--bar", type=float, default=0.9, help="mean reward of the last 20 steps to be reached")
    parser.add_argument("--folder", type=Path, help="for the run, its log and the snapshot")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("override", nargs="*", metavar="KEY.SUB=VALUE", help="changes to the recipe")
    args = parser.parse_args()
    folder = new_folder(args.folder, "chaos")
    print(f"load average {os.getloadavg()[0]:.2f}; folder {folder}", flush=True)
    chaos = Chaos(args, folder)
    signal.signal(signal.SIGTERM, told_to_stop)
    try:
        chaos.go()
    except Broken as broken:
        chaos.note(str(broken))
    finally:
        chaos.known |= chaos.run.everybody()
        if chaos.run.code is None:
            chaos.run.end()
    if left := chaos.run.left_behind(chaos.known, agents=True):
        chaos.note(f"outlived the run: {'; '.join(left)}")
    chaos.audit()
    result = chaos.result(time.monotonic() - BEGAN)
    if result["reward, last 20 steps"] < args.bar:
        chaos.note(f"the reward is below {args.bar}")
    for name, value in result.items():
        print(f"{name}: {value}")
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 1 if chaos.tally.broken else 0


if __name__ == "__main__":
    sys.exit(main())
