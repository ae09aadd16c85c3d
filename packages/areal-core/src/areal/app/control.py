"""The door of a running controller: `areal workers` speaks through it.

One connection, one line of JSON each way:  {"do": "add", "kind": "engine"}  ->  {"done": ...} or {"error": "..."}
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from areal.errors import ArealError, ConfigError, WorkerFailed
from areal.flow.keeper import Keeper
from areal.monitor.folder import RunFolder

SAY_HELLO_S = 10.0
"""For a caller to say what it wants; the controller's loop answers within its lag."""
LIST_S = 30.0
"""Engines are asked how busy they are, which has a deadline of its own."""
PREFIX, SOCKET = "areal-control-", "control"
"""Names of the socket and of the folder that only it is in, among temporary files."""
ANSWER_S = 900.0
"""An engine's start may load a large model; a rollout worker that leaves finishes its episodes."""


@asynccontextmanager
async def serve_control(folder: RunFolder, keeper: Keeper) -> AsyncIterator[None]:
    """Answer on a socket that only this user can open; its path stands in the run's folder while the run goes on.

    The socket lies elsewhere because paths of sockets may have no more than about 100 characters.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(json.dumps(await _answer(reader, keeper)).encode() + b"\n")
            await writer.drain()
        except OSError:
            pass  # the caller has gone; what it asked for is done
        finally:
            writer.close()

    _sweep()
    with _home() as home:
        server = await asyncio.start_unix_server(serve, str(home / SOCKET))
        try:
            folder.control.write_text(str(home / SOCKET), encoding="utf-8")
            yield
        finally:
            folder.control.unlink(missing_ok=True)
            server.close()


@contextmanager
def _home() -> Iterator[Path]:
    """Make a folder for the socket, locked as long as this process lives: the kernel lets go when it is killed."""
    home = Path(tempfile.mkdtemp(prefix=PREFIX))
    handle = os.open(home, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks; there nobody sweeps either
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)
        os.close(handle)


def _sweep() -> None:
    """Remove the folders of controllers that are dead."""
    for home in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or locked: its controller lives
            handle = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Without a socket it is one that is just being made: the lock comes first.
                os.unlink(SOCKET, dir_fd=handle)
                home.rmdir()
            finally:
                os.close(handle)


async def _answer(reader: asyncio.StreamReader, keeper: Keeper) -> dict[str, Any]:
    try:
        async with asyncio.timeout(SAY_HELLO_S):
            wish = json.loads(await reader.readline())
        match wish:
            case {"do": "list"}:
                return {"done": [asdict(row) for row in await keeper.rows()]}
            case {"do": "add", "kind": "engine" | "rollout" as kind}:
                return {"done": await keeper.add(kind)}
            case {"do": "remove", "name": str(name)}:
                return {"done": await keeper.remove(name)}
            case _:
                return {"error": f"the controller was asked {wish!r:.100}; it knows list, add and remove"}
    except ArealError as error:
        return {"error": str(error)}
    except (TimeoutError, ValueError, OSError) as error:
        return {"error": f"the controller could not read what it was asked: {type(error).__name__} {error}"}


def ask(run: str, runs_dir: str, **wish: str) -> Any:
    """Ask the controller of a running run and return what it did.

    Raises ConfigError or WorkerFailed with what the controller said, and JournalError when there is no such run.
    """
    folder = RunFolder.find(run, runs_dir)
    name = folder.path.name
    try:
        place = folder.control.read_text(encoding="utf-8")
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(LIST_S if wish["do"] == "list" else ANSWER_S)
            line.connect(place)
            line.sendall(json.dumps(wish).encode() + b"\n")
            answer = line.makefile("r", encoding="utf-8").readline()
    except (FileNotFoundError, ConnectionError) as error:
        if owner := folder.owner():
            raise ConfigError(
                f"run {name} is starting or ending in process {owner} and its workers cannot be asked for yet; try "
                "again in a moment"
            ) from error
        raise ConfigError(
            f"run {name} is not going on on this machine, so its workers cannot be changed; start it with "
            f"areal resume {name}, or ask where its controller runs"
        ) from error
    except OSError as error:
        raise WorkerFailed(f"the controller of run {name} did not answer in time: {error}") from error
    if not answer:
        raise WorkerFailed(f"the controller of run {name} ended before it had answered")
    said: dict[str, Any] = json.loads(answer)
    if "error" in said:
        raise ConfigError(said["error"])
    return said["done"]
