"""The controller's door: whatever is said to it, it answers in one line, and the run goes on."""

from __future__ import annotations

import asyncio
import json
import stat
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from areal.app.control import ask, serve_control
from areal.errors import ConfigError, JournalError, WorkerFailed
from areal.flow.keeper import Keeper
from areal.flow.roster import WorkerRow
from areal.monitor.folder import RunFolder


class Doorman:
    """A keeper that does as it is told and notes it."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.asked = asyncio.Event()
        self.gate = asyncio.Event()

    async def rows(self) -> list[WorkerRow]:
        return [WorkerRow(name="engine-0", kind="engine", state="serving", pid=7, node="here", work="2 requests")]

    async def add(self, kind: str) -> str:
        self.heard.append(f"add {kind}")
        self.asked.set()
        await self.gate.wait()
        return f"{kind}-9"

    async def remove(self, name: str) -> None:
        raise WorkerFailed(f"{name} would not go")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.yaml").touch()
    return RunFolder(tmp_path / "runs" / "mine")


async def asked(folder: RunFolder, **wish: str) -> Any:
    return await asyncio.to_thread(ask, "mine", str(folder.path.parent), **wish)


async def test_the_controller_answers_while_it_runs_and_not_afterwards(folder: RunFolder) -> None:
    doorman = Doorman()
    with pytest.raises(ConfigError, match=r"run mine is not going on on this machine.*areal resume mine"):
        await asked(folder, do="list")
    async with serve_control(folder, cast(Keeper, doorman)):
        place = Path(folder.control.read_text())
        assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700, "nobody else may enter"
        assert await asked(folder, do="list") == [
            {"name": "engine-0", "kind": "engine", "state": "serving", "pid": 7, "node": "here", "work": "2 requests"}
        ]
        adding = asyncio.create_task(asked(folder, do="add", kind="engine"))
        await doorman.asked.wait()
        assert await asked(folder, do="list"), "one that takes long keeps nobody waiting"
        doorman.gate.set()
        assert await adding == "engine-9" and doorman.heard == ["add engine"]
        with pytest.raises(ConfigError, match=r"^engine-0 would not go$"):
            await asked(folder, do="remove", name="engine-0")
    assert not folder.control.exists()
    # What a controller that was killed leaves behind.
    folder.control.write_text(str(place))
    with pytest.raises(ConfigError, match="run mine is not going on"):
        await asked(folder, do="list")
    with pytest.raises(JournalError, match="no run 'yours'"):
        await asyncio.to_thread(ask, "yours", str(folder.path.parent), do="list")


@pytest.mark.parametrize(
    "line",
    [b"\n", b"no json\n", b"[]\n", b'{"do": "dance"}\n', b'{"do": "add", "kind": "trainer"}\n', b'{"do": "add"}\n'],
)
async def test_what_makes_no_sense_is_answered(folder: RunFolder, line: bytes) -> None:
    async with serve_control(folder, cast(Keeper, Doorman())):
        reader, writer = await asyncio.open_unix_connection(folder.control.read_text())
        writer.write(line)
        answer = json.loads(await asyncio.wait_for(reader.readline(), 5))
        assert "the controller" in answer["error"]
        writer.close()
        await writer.wait_closed()


async def test_a_caller_that_leaves_disturbs_nobody(folder: RunFolder) -> None:
    doorman = Doorman()
    async with serve_control(folder, cast(Keeper, doorman)):
        for sent in (b"", b'{"do": "add", "kind": "engine"}\n'):
            _, writer = await asyncio.open_unix_connection(folder.control.read_text())
            writer.write(sent)
            writer.close()
            await writer.wait_closed()
        await doorman.asked.wait()
        doorman.gate.set()
        assert await asked(folder, do="list")


CONTROLLER = """
import asyncio, sys
from pathlib import Path
from areal.app.control import serve_control
from areal.monitor.folder import RunFolder

async def run():
    async with serve_control(RunFolder(Path(sys.argv[1])), None):
        print("serves", flush=True)
        await asyncio.Event().wait()

asyncio.run(run())
"""


async def test_the_next_controller_removes_what_one_that_was_killed_left(folder: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "next").mkdir()
    command = (sys.executable, "-c", CONTROLLER, str(folder.path))
    controller = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert controller.stdout is not None and await controller.stdout.readline()
        left = Path(folder.control.read_text()).parent
        async with serve_control(RunFolder(tmp_path / "next"), cast(Keeper, Doorman())):
            assert left.exists(), "that controller lives"
    finally:
        controller.kill()
        await controller.wait()
    assert left.exists()
    async with serve_control(folder, cast(Keeper, Doorman())):
        assert not left.exists()
        async with serve_control(RunFolder(tmp_path / "next"), cast(Keeper, Doorman())):
            assert await asked(folder, do="list"), "a controller of the same process lives, too"


def test_paths_of_any_length(tmp_path: Path) -> None:
    deep = tmp_path / ("long" * 40) / "mine"
    deep.mkdir(parents=True)
    (deep / "config.yaml").touch()

    async def scene() -> None:
        async with serve_control(RunFolder(deep), cast(Keeper, Doorman())):
            assert await asyncio.to_thread(ask, str(deep), "runs", do="list")

    asyncio.run(scene())
    assert [path.name for path in deep.iterdir()] == ["config.yaml"]
