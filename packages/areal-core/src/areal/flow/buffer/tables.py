"""The journal's tables, and how a journal of an older AReaL becomes one of this."""

from __future__ import annotations

SCHEMA_VERSION = 2

_ALIKE = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE groups (
    number INTEGER PRIMARY KEY, environment TEXT NOT NULL, prompt_index INTEGER NOT NULL,
    num_samples INTEGER NOT NULL, issued_version INTEGER NOT NULL, issued_at REAL NOT NULL, prompt TEXT);
CREATE TABLE consumed (
    group_number INTEGER PRIMARY KEY REFERENCES groups, step INTEGER NOT NULL, fate TEXT NOT NULL);
CREATE TABLE steps (
    step INTEGER PRIMARY KEY, version INTEGER NOT NULL, finished_at REAL NOT NULL, metrics TEXT NOT NULL);
CREATE TABLE evaluations (step INTEGER PRIMARY KEY, finished_at REAL NOT NULL, metrics TEXT NOT NULL);
CREATE TABLE versions (version INTEGER PRIMARY KEY, committed_at REAL NOT NULL);
CREATE TABLE checkpoints (step INTEGER PRIMARY KEY, path TEXT NOT NULL, completed_at REAL NOT NULL);
"""
"""What schema 1 had as well."""

# With row ids: without them, a row of more than a quarter of a page takes a page of its own.
_TRAJECTORIES = """
CREATE TABLE trajectories (
    group_number INTEGER NOT NULL REFERENCES groups, sample INTEGER NOT NULL, status TEXT NOT NULL, reward REAL,
    min_version INTEGER, num_tokens INTEGER NOT NULL, finished_at REAL NOT NULL, body TEXT NOT NULL, tokens BLOB,
    PRIMARY KEY (group_number, sample));
"""

_SINCE_2 = """
CREATE TABLE failures (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, step INTEGER NOT NULL, worker TEXT NOT NULL, kind TEXT NOT NULL,
    reason TEXT NOT NULL);
CREATE TABLE damaged (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, group_number INTEGER NOT NULL, sample INTEGER, reason TEXT NOT NULL,
    body, tokens);
CREATE INDEX consumed_by_step ON consumed (step);
"""
"""`failures`: workers that were lost. `damaged`: rows set aside (`sample` is NULL for a prompt)."""

CREATE = f"{_ALIKE} {_TRAJECTORIES} {_SINCE_2} INSERT INTO meta VALUES ('schema', '{SCHEMA_VERSION}');"

FROM_1 = f"""
ALTER TABLE trajectories ADD COLUMN tokens BLOB;
{_SINCE_2}
UPDATE meta SET value = '2' WHERE key = 'schema';
"""

TABLES_OF_1 = ("checkpoints", "consumed", "evaluations", "groups", "meta", "steps", "trajectories", "versions")
TABLES = tuple(sorted((*TABLES_OF_1, "failures", "damaged")))
