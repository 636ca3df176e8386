"""What `bsearch check` finds on a machine where things are in order, and where they are broken for real."""

from __future__ import annotations

import json
import os
import re
import socket
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from bsearch.objectives.machine.host import cgroup_limit
from bsearch.search.preview.doctor import (
    Finding,
    cpu,
    disks,
    examined,
    packages,
    storage_findings,
)
from bsearch.search.store.tables import Tables
from click.testing import Result
from conftest import BSEARCH
from helpers import bsearch


def doctor(*arguments: object) -> Result:
    return bsearch("check", *arguments)


def the(findings: Iterator[Finding], name: str) -> Finding:
    return next(finding for finding in findings if finding.name == name)


def test_a_sound_machine_is_told_in_lines_and_in_a_document(study_file: Callable[..., Path]) -> None:
    path = study_file()
    result = doctor(path, "--machine", "--serial")
    assert "does not exist yet; `bsearch run` creates it" in result.output
    assert not path.with_name("small.db").exists()  # nothing was made
    document = json.loads(doctor(path, "--machine", "--serial", "--json").output)
    names = {finding["name"] for finding in document["findings"]}
    assert {"packages", "cpu", "gpu", "disk", "storage"} <= names
    assert document["counts"]["problem"] == 0
    assert result.exit_code == 0


def test_every_warning_and_problem_says_what_to_do() -> None:
    assert next(cpu(limits=[["150000", "100000"]])).state in ("ok", "warning")
    for finding in cpu(limits=[["10000", "100000"]]):
        assert finding.state != "ok"
        assert finding.advice


def test_a_container_limit_is_the_least_of_all_groups_above(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "a" / "cpu.max").write_text("200000 100000\n")
    (inner / "cpu.max").write_text("max 100000\n")
    mine = tmp_path / "cgroup"
    mine.write_text("0::/a/b\n")
    assert cgroup_limit("cpu.max", tmp_path, mine) == [["max", "100000"], ["200000", "100000"]]


def test_a_database_is_looked_at_and_never_changed(tmp_path: Path) -> None:
    file = tmp_path / "study.db"
    url = f"sqlite:///{file}"
    assert "does not exist yet" in the(storage_findings(url), "storage").found
    Tables(url).close()
    before = file.read_bytes()
    assert the(storage_findings(url), "storage").state == "ok"
    assert file.read_bytes() == before
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("UPDATE bsearch_alembic_version SET version_num = '9999'")
        connection.commit()
    assert "a newer bsearch has written it (schema 9999" in the(storage_findings(url), "storage").found
    file.write_bytes(b"no database at all" * 100)
    assert the(storage_findings(url), "storage").state == "problem"


def test_passwords_are_masked_and_a_server_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and never listens
        url = f"postgresql+psycopg://ann:s3cret@127.0.0.1:{taken.getsockname()[1]}/db"
        monkeypatch.setenv("BSEARCH_STORAGE", url)
        result = doctor("--serial")
    assert (result.exit_code, "s3cret" in result.output) == (1, False)
    assert "problem  storage" in result.output


def test_a_disk_is_looked_at_and_versions_are_told(tmp_path: Path) -> None:
    found = next(disks(None, f"sqlite:///{tmp_path}/none/study.db"))
    assert (found.name, found.state) == ("disk", "ok")
    assert re.search(r"Python 3\.\d+\.\d+, bsearch .*, torch \d", the(packages(), "packages").found)


def test_a_check_that_fails_itself_ends_no_other() -> None:
    def broken() -> Iterator[Finding]:
        raise ZeroDivisionError("division by zero")

    found = list(examined([("broken", broken), ("packages", packages)]))
    assert [finding.name for finding in found] == ["broken", "packages"]
    assert found[0].state == "warning"


def session(group: int) -> list[int]:
    """Processes of a session that are still there."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, member = (process / "stat").read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        if int(member) == group and state != "Z":
            found.append(int(process.name))
    return found


@pytest.mark.ray
@pytest.mark.long
def test_ray_starts_answers_and_leaves_nothing_behind(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    with subprocess.Popen(
        [BSEARCH, "check"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        output = process.communicate(timeout=400)[0]
    assert "starts and answers" in output
    assert process.returncode == 0, output
    assert not session(process.pid)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.ray
def test_an_address_where_nobody_listens_is_told_with_its_variable(tmp_path: Path) -> None:
    environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"}
    result = subprocess.run(
        [BSEARCH, "check"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "RAY_ADDRESS=127.0.0.1:1 is set: unset it" in result.stdout
