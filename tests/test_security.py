"""What docs/security.md promises: where a run listens, who is let in, and what code here never does."""

from __future__ import annotations

import csv
import io
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from bsearch.search.report.export import csv_text
from bsearch.search.store.tables import Tables
from bsearch.spaces.boundary.files import write_file
from bsearch.spaces.record import TrialFacts
from conftest import BSEARCH, TASKS
from helpers import SPACE, bsearch

ROOT = Path(__file__).parent.parent


# ---------------------------------------------------------------- who listens where


def _children(root: int) -> set[int]:
    """A process and all that it started, and they started."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # gone meanwhile
    found, more = {root}, True
    while more:
        grown = found | {child for child, parent in parents.items() if parent in found}
        found, more = grown, grown != found
    return found


def _listening(processes: set[int]) -> dict[str, str]:
    """Addresses at which processes listen, in the kernel's hexadecimal words, and who does."""
    inodes = {}
    for process in processes:
        try:
            for handle in Path(f"/proc/{process}/fd").iterdir():
                if found := re.fullmatch(r"socket:\[(\d+)\]", str(handle.readlink())):
                    inodes[found[1]] = (Path(f"/proc/{process}/comm")).read_text().strip()
        except OSError:
            continue
    listening = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                listening[fields[1]] = inodes[fields[9]]
    return listening


def _is_loopback(address: str) -> bool:
    host = address.partition(":")[0]
    words = [bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8)]  # little-endian words
    packed = b"".join(words)
    packed = packed.removeprefix(bytes(10) + b"\xff\xff")  # an IPv4 address inside IPv6
    return packed[0] == 127 if len(packed) == 4 else packed == bytes(15) + b"\x01"


_JOIN = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR'); print('LET IN')"


def _joining(address: str, token: str | None) -> subprocess.Popen[str]:
    """A stranger who tries to join a Ray, and prints whether it was let in."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= (
        {"RAY_AUTH_MODE": "disabled"}
        if token is None
        else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    )
    environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    command = [sys.executable, "-c", _JOIN, address]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _proc(process: int, name: str) -> str:
    """What Linux says of a process; nothing of one that has ended, as a trial's."""
    try:
        return Path(f"/proc/{process}/{name}").read_bytes().decode()
    except OSError:
        return ""


@pytest.mark.cluster
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs /proc")
@pytest.mark.timeout(480)  # whoever is refused tries for half a minute, longer beside neighbours
def test_a_run_listens_on_the_loopback_alone_and_lets_no_stranger_in(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    path = study_file(
        task=f"{TASKS}:Slow", space=SPACE, devices={"per_trial": 2}, budget={"trials": 60}, cluster=None
    )
    home = tmp_path / "home"
    home.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
        "HOME": str(home)
    }
    with subprocess.Popen(
        [BSEARCH, "run", path], stdout=subprocess.PIPE, text=True, env=environment
    ) as driver:
        try:
            assert driver.stdout is not None
            while "complete" not in (line := driver.stdout.readline()):
                assert driver.poll() is None, line
            processes = _children(driver.pid)
            listening = _listening(processes)
            # The driver, the GCS, the raylet, the worker, and the meeting place of its two ranks and their own ends.
            assert len(listening) > 8
            assert {"gcs_server", "raylet"} <= set(listening.values())
            assert {address: who for address, who in listening.items() if not _is_loopback(address)} == {}
            (command,) = (
                words
                for process in processes
                if "/raylet" in (words := _proc(process, "cmdline")).partition("\0")[0]
            )
            found = re.search(r"--gcs-address=([0-9.:]+)", command)
            assert found is not None
            tokens = {
                value
                for process in processes
                for name, _, value in (pair.partition("=") for pair in _proc(process, "environ").split("\0"))
                if name == "RAY_AUTH_TOKEN"
            }
            (token,) = tokens
            assert len(token) == 64
            assert token not in "".join(_proc(process, "cmdline") for process in processes)
            # At once, for whoever is refused tries for a while.
            strangers = {who: _joining(found[1], who) for who in (None, "0" * 64, token)}
            let_in = {who for who, stranger in strangers.items() if "LET IN" in stranger.communicate()[0]}
            assert let_in == {token}
            assert not (home / ".ray").exists()
        finally:
            driver.terminate()
            driver.wait(timeout=400)


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.parametrize("mode", ["disabled", "token"])
def test_a_cluster_of_others_keeps_its_own_mode(
    study_file: Callable[..., Path], tmp_path: Path, mode: str
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_AUTH_MODE": mode, "RAY_USAGE_STATS_ENABLED": "0", "HOME": str(tmp_path)}
    environment |= {"RAY_AUTH_TOKEN": "7" * 64} if mode == "token" else {}
    start = [
        "ray",
        "start",
        "--head",
        "--block",
        f"--port={port}",
        "--num-cpus=1",
        "--include-dashboard=false",
    ]
    with subprocess.Popen(
        [BSEARCH.parent / start[0], *start[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as head:
        try:
            assert head.stdout is not None
            lines = []
            while "--block" not in (line := head.stdout.readline()):
                lines.append(line)
                assert head.poll() is None, "".join(lines)
            found = re.search(r"--address='([0-9.]+:[0-9]+)'", "".join(lines))
            address = found[1] if found else f"127.0.0.1:{port}"
            path = study_file(task=f"{TASKS}:Points", budget={"trials": 2}, cluster={"address": address})
            mine = {**environment, **({} if mode == "token" else {"RAY_AUTH_MODE": "disabled"})}
            done = subprocess.run(
                [BSEARCH, "run", path], env=mine, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
        finally:
            head.terminate()
            head.wait(timeout=60)


# ---------------------------------------------------------------- what is shown and written


HOSTILE = ["\x1b[31mred", "[red]", "[/nothing]", "=cmd()|'/c calc'!A0", "<script>", "\x9b2J", "+1", ":boom:"]


def test_strings_of_a_database_are_shown_and_not_obeyed(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    path = study_file(task=f"{TASKS}:Points", budget={"trials": 3}, training={"evaluations": 1})
    assert bsearch("run", path, "--serial").exit_code == 0
    tables = Tables(f"sqlite:///{tmp_path}/small.db")
    for trial in tables.trials("small"):
        hostile = TrialFacts(extra={f"note{number}": text for number, text in enumerate(HOSTILE)})
        tables.save_trial("small", replace(trial, facts=trial.facts | hostile))
    with tables.engine.begin() as connection:
        connection.exec_driver_sql(
            "UPDATE bsearch_attempt SET traceback = ?", ("\x1b]0;owned\x07[bold]line",)
        )
    one = bsearch("show", path, "--pick", "1").output
    for shown in (
        r"\x1b[31mred",
        "[red]",
        "[/nothing]",
        "<script>",
        r"\u009b2J",
        ":boom:",
        r"\x1b]0;owned\x07[bold]line",
    ):
        assert shown in one
    outputs = [bsearch("show", path, *more) for more in ([], ["--all"], ["--pick", "1"], ["--json"])]
    outputs += [bsearch("export", path, "--to", kind) for kind in ("csv", "json")]
    for result in outputs:
        assert result.exit_code == 0, result.output
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", result.output)
    row = next(csv.DictReader(io.StringIO(outputs[4].output)))
    assert row["note3"] == "'=cmd()|'/c calc'!A0"
    assert row["note6"] == "'+1"


@pytest.mark.slow
def test_a_table_shows_brackets_of_a_message(study_file: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text("""def Mine(setup):
    if setup.samples_budget > 2 * setup.effective_batch:  # in trials, and not where it is tried beforehand
        raise ValueError('[/red] \\x1b[2J [bold]x')
    from bsearch import Measurement
    yield Measurement(setup.samples_budget, 0.1, 0.5)
""")
    path = study_file(task="tasks.py:Mine", training={"samples": 400, "evaluations": 1})
    ran = bsearch("run", path, "--serial")
    assert r"[/red] \x1b[2J [bold]x" in ran.output
    assert r"[/red] \x1b[2J [bold]x" in bsearch("show", path, "--all").output


def test_cells_of_a_csv_begin_no_formula() -> None:
    rows = [{"a": "=1", "b": "+1", "c": "-1", "d": "@x", "e": -1.5, "f": "x\x1b[0m", "g": "sqrt"}]
    assert csv_text(rows).splitlines()[1] == r"'=1,'+1,'-1,'@x,-1.5,x\x1b[0m,sqrt"


def test_a_link_in_the_place_of_a_file_is_replaced_and_never_followed(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("kept")
    link = tmp_path / "front.csv"
    link.symlink_to(theirs)
    write_file(link, "new")
    assert (theirs.read_text(), link.read_text(), link.is_symlink()) == ("kept", "new", False)


def test_what_is_no_plain_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    link = tmp_path / "null"
    link.symlink_to("/dev/null")
    write_file(link, "text")
    assert link.is_symlink()
    assert Path("/dev/null").is_char_device()


def test_init_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").symlink_to(tmp_path / "nowhere")
    result = bsearch("init", tmp_path)
    assert (result.exit_code, "already contains tasks.py; nothing was written" in result.output) == (2, True)
    assert os.listdir(tmp_path) == ["tasks.py"]


@pytest.mark.parametrize(
    "name", ["..", ".", "../up", "a/b", "/abs", ".hidden", "-rf", "a\\b", "", "a" * 101, "a\n", "a\x00"]
)
def test_no_name_of_a_study_leaves_its_folder(study_file: Callable[..., Path], name: str) -> None:
    result = bsearch("run", study_file(study=name), "--serial")
    assert result.exit_code == 2
    assert "study: expected a name of letters, digits, '.', '_' and '-'" in result.output


def test_show_leaves_databases_of_others_as_they_are(tmp_path: Path) -> None:
    optuna.create_study(study_name="theirs", storage=f"sqlite:///{tmp_path}/theirs.db")
    result = bsearch("show", f"sqlite:///{tmp_path}/theirs.db")
    assert (result.exit_code, "holds no study of bsearch's" in result.output) == (1, True)
    assert b"bsearch_study" not in (tmp_path / "theirs.db").read_bytes()
    assert bsearch("show", f"sqlite:///{tmp_path}/deep/er/no.db").exit_code == 1
    assert not (tmp_path / "deep").exists()


# ---------------------------------------------------------------- what code here never does

# (file, line) of what is known, and why it may be.
KNOWN = {
    ("tests/tasks_for_tests.py", "exec("): "a line that seems to be another file's",
    (
        "objectives/parallel/rank_main.py",
        "pickle.loads",
    ): "tries out whether an error of our own survives the way to another process",
    ("objectives/script/told.py", "exec("): "runs the user's own script, which the task names",
    ("tests/search/suggest/test_ask_tell.py", "exec("): "runs the documented example as it stands",
    ("tests/exported_settings.py", "exec("): "runs what an export prints, as a user would",
    (
        "tests/objectives/test_task_code.py",
        "pickle.loads",
    ): "reads what it has just written, as a loader's process does",
    ("tests/test_startup.py", "pickle.loads"): "reads what it has just written, as a worker of Ray does",
    ("search/store/database.py", "text in SQL"): "pragmas take no parameters; their values are our own",
    ("tests/rough/test_users_exits.py", "exec("): "is what a task does to its process",
    ("tests/rough/test_places.py", "text in SQL"): "tables take no parameters; their names are our own",
    ("tests/rough/test_file_names.py", "text in SQL"): "tables take no parameters; their names are our own",
    (
        "tests/rough/test_strangers_files.py",
        "text in SQL",
    ): "tables take no parameters; their names are our own",
}
NEVER = {
    "shell=True": r"shell\s*=\s*True",
    "os.system": r"\bos\.(system|popen)\(",
    "eval(": r"(?<![\w.])(?<!def )eval\(",
    "exec(": r"(?<![\w.])exec\(",
    "pickle.loads": r"\b(pickle|cloudpickle|dill|marshal)\.loads?\(",
    "yaml.load": r"\byaml\.(unsafe_|full_)?load(_all)?\(",
    "torch.load": r"torch\.load\((?![^)]*weights_only=True)",
    "text in SQL": r"(?<!\w)(execute|exec_driver_sql|text)\(\s*(f\"|f'|[\"'][^\"']*[\"']\s*(%|\+|\.format))",
    "no certificate": r"verify\s*=\s*False|_create_unverified_context",
    "temporary names": r"tempfile\.mktemp\(",
}


def _sources() -> Iterator[Path]:
    packages = ("spaces", "objectives", "search", "cluster", "commands")
    for package in ("", *packages, "benchmarks", "tests", "examples", "docs"):
        yield from sorted((ROOT / package).rglob("*.py") if package else ROOT.glob("*.py"))


def test_no_code_here_runs_what_it_was_given() -> None:
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in _sources()
        if path != Path(__file__)
        for name, pattern in NEVER.items()
        if re.search(pattern, path.read_text())
    }
    assert found == set(KNOWN)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("shell=True", "run('ls', shell = True)"),
        ("eval(", "x = eval(text)"),
        ("pickle.loads", "pickle.load(file)"),
        ("yaml.load", "yaml.load(text, Loader)"),
        ("torch.load", "torch.load(path)"),
        ("text in SQL", 'connection.execute(f"SELECT {x}")'),
    ],
)
def test_the_search_for_such_code_finds_it(name: str, code: str) -> None:
    assert re.search(NEVER[name], code)
    assert not re.search(NEVER["torch.load"], "torch.load(path, weights_only=True)")
    assert not re.search(NEVER["eval("], "model.eval()")
