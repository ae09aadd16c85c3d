"""The journal as schema 1 wrote it, every token as JSON: what older runs left, and a side of journal_cost.py.

Imports nothing of areal's journal, so that it stays what it was.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE groups (
    number INTEGER PRIMARY KEY, environment TEXT NOT NULL, prompt_index INTEGER NOT NULL,
    num_samples INTEGER NOT NULL, issued_version INTEGER NOT NULL, issued_at REAL NOT NULL, prompt TEXT);
CREATE TABLE trajectories (
    group_number INTEGER NOT NULL REFERENCES groups, sample INTEGER NOT NULL, status TEXT NOT NULL, reward REAL,
    min_version INTEGER, num_tokens INTEGER NOT NULL, finished_at REAL NOT NULL, body TEXT NOT NULL,
    PRIMARY KEY (group_number, sample)) WITHOUT ROWID;
CREATE TABLE consumed (
    group_number INTEGER PRIMARY KEY REFERENCES groups, step INTEGER NOT NULL, fate TEXT NOT NULL);
CREATE TABLE steps (
    step INTEGER PRIMARY KEY, version INTEGER NOT NULL, finished_at REAL NOT NULL, metrics TEXT NOT NULL);
CREATE TABLE evaluations (step INTEGER PRIMARY KEY, finished_at REAL NOT NULL, metrics TEXT NOT NULL);
CREATE TABLE versions (version INTEGER PRIMARY KEY, committed_at REAL NOT NULL);
CREATE TABLE checkpoints (step INTEGER PRIMARY KEY, path TEXT NOT NULL, completed_at REAL NOT NULL);
INSERT INTO meta VALUES ('schema', '1');
"""
_TURN = ("uid", "prompt_ids", "token_ids", "logprobs", "versions", "finish_reason")


def open_v1(path: Path) -> sqlite3.Connection:
    """Make a new journal of schema 1."""
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=NORMAL")
    db.executescript(SCHEMA)
    return db


def issue(db: sqlite3.Connection, number: int, num_samples: int, prompt: str | None = None) -> None:
    row = (number, "digits", number, num_samples, 0, time.time(), prompt)
    db.execute("INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?)", row)


def encode(trajectory: Any) -> str:
    outcome = trajectory.outcome
    return json.dumps(
        {
            "turns": [{name: getattr(turn, name) for name in _TURN} for turn in trajectory.turns],
            "outcome": {
                "status": outcome.status,
                "reward": outcome.reward,
                "detail": outcome.detail,
                "metrics": dict(outcome.metrics),
            },
        }
    )


def finish(db: sqlite3.Connection, trajectories: Iterable[Any]) -> None:
    """Write finished trajectories in one transaction."""
    now = time.time()
    rows = [
        (
            t.group,
            t.sample,
            t.outcome.status,
            t.outcome.reward,
            min((version for turn in t.turns for version in turn.versions), default=None),
            sum(len(turn.token_ids) for turn in t.turns),
            now,
            encode(t),
        )
        for t in trajectories
    ]
    db.execute("BEGIN IMMEDIATE")
    db.executemany("INSERT OR IGNORE INTO trajectories VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
    db.execute("COMMIT")
