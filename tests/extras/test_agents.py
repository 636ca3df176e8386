"""`bsearch mcp` by the kit's own client, over stdin and stdout: what an agent does in a folder, and what it may not."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import BASELINE, TASKS, small_study
from helpers import validated

mcp = pytest.importorskip("mcp")

Call = Callable[..., Awaitable[dict[str, Any]]]


def folder_of(path: Path) -> Path:
    """A folder with two studies of a task of its own."""
    (path / "tasks.py").write_text(TASKS.read_text(encoding="utf-8"))
    for name, changes in {
        "main": {},
        "change": {"training": {"evaluations": 3}},
        "outside": {"task": "../tasks.py:Points"},
        "schedule": {"training": {"schedule": "../tasks.py:schedule"}},
        "earlier": {"warm_start": ["../earlier.csv"]},
        "home": {"budget": {"trials": 2, "by": "1h", "keep": "~/model"}},
        "file": {"cluster": {"checkpoints": f"file://{path.parent}"}},
        "broken": {"task": "tasks.py:Raises"},
    }.items():
        study = small_study(**{"study": name, "task": "tasks.py:Points", "baseline": [BASELINE], **changes})
        (path / f"{name}.yaml").write_text(yaml.safe_dump(study))
    (path.parent / "tasks.py").write_text("raise RuntimeError('this is not the folder')")
    return path


def as_agent(folder: Path, work: Callable[[Any, Call], Awaitable[None]]) -> None:
    """Do something with a server's tools; every answer is validated."""

    async def connected() -> None:
        server = mcp.StdioServerParameters(
            command=sys.executable,
            args=["-m", "bsearch", "mcp", str(folder)],
            env={**os.environ},
            cwd=str(folder),
        )
        async with mcp.Client(server) as client:

            async def call(tool: str, **arguments: Any) -> dict[str, Any]:
                result = await client.call_tool(tool, arguments)
                (content,) = result.content
                document = validated(content.text)
                assert result.structured_content == document
                assert result.is_error == (document["answer"] == "error")
                return document

            await work(client, call)

    asyncio.run(asyncio.wait_for(connected(), 240))


async def until(call: Call, condition: Callable[[dict[str, Any]], bool], study: str) -> dict[str, Any]:
    ends = time.monotonic() + 120
    while not condition(told := await call("status", study=study)):
        assert time.monotonic() < ends, told
        await asyncio.sleep(0.3)
    return told


@pytest.mark.slow
def test_an_agent_checks_runs_stops_resumes_and_decides(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)

    async def work(client: Any, call: Call) -> None:
        assert {tool.name for tool in (await client.list_tools()).tools} == {
            *("check", "run", "status", "stop", "front", "explain", "ask", "compare", "export")
        }
        assert (await call("check", study="main.yaml"))["examination"]["verdict"] == "exact"
        assert (await call("status", study="main.yaml"))["error"]["kind"] == "no_study"
        first = await call("run", study="main.yaml", trials=400, serial=True)
        again = await call("run", study="main.yaml", trials=400, serial=True)
        assert (first["started"], again["started"], again["running"]) == (True, False, first["running"])
        await until(call, lambda told: told.get("trials", {}).get("complete", 0) >= 3, "main.yaml")
        stopped = await call("stop", study="main.yaml")
        assert (stopped["running"], stopped["last_run"]["exit_code"]) == (None, 130)
        done = stopped["trials"]["complete"]
        os.kill(
            int((await call("run", study="main.yaml", trials=400, serial=True))["running"]["process"]),
            signal.SIGKILL,
        )
        killed = await until(call, lambda told: "last_run" in told and told["running"] is None, "main.yaml")
        assert killed["trials"]["complete"] >= done
        most = int(killed["budget"]["done"]) + 2
        await call("run", study="main.yaml", trials=most, serial=True)
        ended = await until(call, lambda told: told.get("last_run", {}).get("exit_code") == 0, "main.yaml")
        front = await call("front", study="main.yaml")
        assert (front["budget"]["done"], front["best"]) == (most, ended["best"])
        assert (await call("explain", study="main.yaml", trial=front["best"]))["outcome"] == "complete"
        assert "front" in (await call("ask", source="main.yaml"))["groups"][0]["verdicts"]
        assert (
            "learning_rate"
            in (await call("export", study="main.yaml", to="yaml", trial=front["best"]))["text"]
        )
        told = await call("compare", study="main.yaml", change="change.yaml", trials=12)
        while told["answer"] == "pending":
            told = await call("compare", study="main.yaml", change="change.yaml", trials=12)
        assert told["answer"] == "compare"
        answers = json.loads((await client.read_resource("bsearch://schemas/answers")).contents[0].text)
        assert "compare" in answers["$defs"]

    as_agent(folder, work)


@pytest.mark.slow
def test_what_an_agent_may_not_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (folder := tmp_path / "folder").mkdir()
    folder_of(folder)
    os.symlink(tmp_path / "tasks.py", folder / "link.yaml")

    async def work(client: Any, call: Call) -> None:
        for study, expected in (
            ("../tasks.py", "in the folder"),
            ("/etc/passwd", "in the folder"),
            ("link.yaml", "in the folder"),
            ("outside.yaml", "task: expected a path in the folder"),
            ("schedule.yaml", "training.schedule: expected a path in the folder"),
            ("earlier.yaml", "warm_start.0: expected a path in the folder"),
            ("home.yaml", "budget.keep: expected a path in the folder"),
            ("file.yaml", "cluster.checkpoints: expected a path in the folder"),
            ("none.yaml", "expected a file"),
            ("x" * 10_000_000, "expected a file"),
            ("a\0b", "expected a file"),
        ):
            told = await call("front", study=study)
            assert expected in told["error"]["message"], study[:40]
        unknown = await call("front", study="main.yaml", colour="red")
        assert (unknown["error"]["expected"], unknown["error"]["got"]) == ("study", "colour")
        for setting in (
            "storage=sqlite:////x.db",
            "task=x.py:y",
            "budget.keep=/x",
            "training.schedule=../tasks.py:schedule",
        ):
            assert (
                "expected a key of space"
                in (await call("check", study="main.yaml", settings=[setting]))["error"]["message"]
            )
        assert "study files" in (await call("check", study="main.yaml", settings=["space.epocs=3"]))["schema"]
        # A hundred at once are one question.
        started = time.monotonic()
        answers = await asyncio.gather(*(call("front", study="main.yaml") for _ in range(100)))
        assert {told["error"]["kind"] for told in answers} == {"no_study"}
        assert len({json.dumps(told) for told in answers}) == 1
        assert time.monotonic() - started < 60

    as_agent(folder, work)
    assert {path.suffix for path in folder.iterdir() if path.name != "__pycache__"} == {".py", ".yaml"}


def test_no_earlier_runs_elsewhere_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However a warm start names them: by a reader, a study file with a storage of its own, a link, or the current folder."""
    from bsearch.extras.agents.folder import Folder
    from bsearch.search.suggest.priors.warm_start import _source
    from bsearch.spaces.errors import StudyFileError

    root = tmp_path / "folder"
    root.mkdir()
    folder_of(root)
    (tmp_path / "runs.csv").write_text("a")
    (root / "own.csv").write_text("a")
    (root / "link.csv").symlink_to(tmp_path / "runs.csv")
    stored = small_study(study="stored", task="tasks.py:Points", storage=f"sqlite:///{tmp_path}/elsewhere.db")
    (root / "stored.yaml").write_text(yaml.safe_dump(stored))

    def named(place: str, study: str = "asks.yaml") -> str:
        changed = small_study(study="asks", task="tasks.py:Points", warm_start=[place])
        (root / study).write_text(yaml.safe_dump(changed))
        return Folder(root).study(study).warm_start[0]

    for place, where in (
        ("../runs.csv", "warm_start.0"),
        ("link.csv", "warm_start.0"),
        (f"tensorboard:{tmp_path}", "warm_start.0"),
        ("wandb:me/project", "warm_start.0"),
        (f"optuna:sqlite:///{tmp_path}/other.db#s", "warm_start.0"),
        ("stored.yaml", "warm_start.0: storage"),
        ("../stored.yaml", "../stored.yaml"),
    ):
        with pytest.raises(StudyFileError, match="expected a path in the folder of this server") as refused:
            named(place)
        assert where in str(refused.value), place
    for place in ("own.csv", "main.yaml", "asks.yaml", "an-earlier-name"):
        assert named(place) == place
    monkeypatch.chdir(tmp_path)  # which has a runs.csv
    assert _source(Folder(root).study("main.yaml"), "runs.csv") == str(root / "runs.csv")
    (root / "wandb:me").mkdir()
    (root / "wandb:me" / "--save=x").write_text("a")
    assert Folder(root).path("wandb:me/--save=x") == "./wandb:me/--save=x"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_server_that_is_stopped_ends_with_what_it_asks(number: int, code: int, tmp_path: Path) -> None:
    """Though its stdin stays open; a run that it has started goes on."""
    folder = folder_of(tmp_path)
    sleeps = "import os, pathlib, time\npathlib.Path(f'pid-{os.getpid()}').touch()\ntime.sleep(600)\n"
    (folder / "tasks.py").write_text(sleeps + (folder / "tasks.py").read_text())
    hello = {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    }
    asked = {"name": "check", "arguments": {"study": "main.yaml"}}
    messages = [
        {"id": 1, "method": "initialize", "params": hello},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": asked},
    ]
    command, pipe = [sys.executable, "-m", "bsearch", "mcp", str(folder)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as server:
        assert server.stdin is not None
        for message in messages:
            server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        server.stdin.flush()
        ends = time.monotonic() + 120
        while not (begun := list(folder.glob("pid-*"))):
            assert time.monotonic() < ends
            time.sleep(0.1)
        server.send_signal(number)
        assert server.wait(60) == code
        pid = int(begun[0].name.removeprefix("pid-"))
        while Path(f"/proc/{pid}").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
            assert time.monotonic() < ends
            time.sleep(0.1)


@pytest.mark.slow
def test_an_error_after_events_is_what_a_run_and_its_status_tell(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)

    async def work(client: Any, call: Call) -> None:
        await call("run", study="broken.yaml", serial=True)
        told = await until(call, lambda told: "last_run" in told, "broken.yaml")
        assert "the score is not ready" in json.dumps(told["last_run"])
        long = await call("check", study="main.yaml", settings=[f"space.width={'1' * 200_000}"])
        assert "100000 characters" in long["error"]["message"]

    as_agent(folder, work)


@pytest.mark.slow
def test_of_two_agents_that_run_a_study_one_starts_it_and_the_newest_run_is_its_last(tmp_path: Path) -> None:
    from bsearch.extras.agents.folder import Folder

    folder = Folder(folder_of(tmp_path))

    async def both() -> list[dict[str, Any]]:
        return await asyncio.gather(*(folder.run("main.yaml", trials, (), serial=True) for trials in (1, 2)))

    assert sorted(told["started"] for told in asyncio.run(both())) == [False, True]
    (run,) = folder._runs.values()
    run.wait()
    commands = [("run", "none.yaml", "--trials", str(trials)) for trials in (3, 4, 3)]
    for command in commands:
        folder.start("none", *command)[0].wait()
    assert list(folder._runs)[1:] == commands[1:]


def test_a_text_to_paste_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bsearch.extras.agents import folder

    program = "x = 1\n" * 2000
    monkeypatch.setattr(folder, "_command", lambda *_: [sys.executable, "-c", f"print({program!r}, end='')"])
    assert asyncio.run(folder.Folder(tmp_path).text("export"))["text"] == program


@pytest.mark.slow
@pytest.mark.long
def test_what_a_task_prints_is_no_answer(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    said = [
        {"answer": name, "version": 1, "error": {"kind": "study", "message": "not ours"}}
        for name in ("show", "error")
    ]
    shouts = "".join(
        f"print({json.dumps(json.dumps(line))}, file=sys.{to})\n"
        for line in said
        for to in ("stdout", "stderr")
    )
    (folder / "tasks.py").write_text(TASKS.read_text(encoding="utf-8") + f"\nimport sys\n{shouts}")

    async def work(client: Any, call: Call) -> None:
        assert (await call("check", study="main.yaml"))["answer"] == "check"
        unknown = await call("check", study="main.yaml", settings=["space.rule=nonsense"])
        assert "nonsense" in unknown["error"]["message"]
        await call("run", study="main.yaml", serial=True)
        ended = await until(call, lambda told: told.get("last_run", {}).get("exit_code") == 0, "main.yaml")
        assert (ended["answer"], ended["last_run"].get("error")) == ("show", None)

    as_agent(folder, work)
