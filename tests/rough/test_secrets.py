"""Forty forms of a database's URL, at every place where one is shown: no secret is."""

from __future__ import annotations

from pathlib import Path

import bsearch
import pytest
import yaml
from bsearch.cli import main
from click.testing import CliRunner
from conftest import small_study

KIND = "secrets in URLs"
pytestmark = pytest.mark.long
HIDDEN = "hunter2"
# At port 1 of this machine nobody listens.
HERE = "127.0.0.1:1"
URLS = [
    f"postgresql+psycopg://ann:{HIDDEN}@{HERE}/d",
    f"postgresql+psycopg://ann@acme:{HIDDEN}@{HERE}/d",
    f"postgresql+psycopg://ann%40acme:{HIDDEN}@{HERE}/d",
    f"postgresql+psycopg://ann:a {HIDDEN}@{HERE}/d",
    f"postgresql+psycopg://ann:it's {HIDDEN}@{HERE}/d",
    f'postgresql+psycopg://ann:"{HIDDEN}"@{HERE}/d',
    f"postgresql+psycopg://ann:x@{HIDDEN}@{HERE}/d",
    f"postgresql+psycopg://ann:x/{HIDDEN}@{HERE}/d",
    f"postgresql+psycopg://ann:x?{HIDDEN}@{HERE}/d",
    f"postgresql+psycopg://ann:x#{HIDDEN}@{HERE}/d",
    f"postgresql+psycopg://ann:x:{HIDDEN}@{HERE}/d",
    f"postgresql+psycopg://ann:x&{HIDDEN}@{HERE}/d",
    f"postgresql+psycopg://ann:%20{HIDDEN}@{HERE}/d",
    f"postgresql+psycopg://ann:{HIDDEN}\\@{HERE}/d",
    f"postgresql+psycopg://:{HIDDEN}@{HERE}/d",
    f"postgresql+psycopg://ann smith:{HIDDEN}@{HERE}/d",
    f"postgresql+psycopg://ann:{HIDDEN}@[::1]:1/d",
    f"postgresql+psycopg://ann:{HIDDEN}@/d?host=127.0.0.1&port=1",
    f"postgresql+psycopg://ann@{HERE}/d?password={HIDDEN}",
    f"postgresql+psycopg://ann@{HERE}/d?password=a {HIDDEN}",
    f"postgresql+psycopg://ann@{HERE}/d?password='{HIDDEN}'",
    f"postgresql+psycopg://ann@{HERE}/d?passfile={HIDDEN}",
    f"postgresql+psycopg://ann@{HERE}/d?sslpassword={HIDDEN}&sslmode=disable",
    f"postgresql+psycopg://ann@{HERE}/d?pass%77ord={HIDDEN}",
    f"postgresql+psycopg://ann@{HERE}/d?options=-c%20my.key%3D{HIDDEN}",
    f"postgresql+psycopg://ann:{HIDDEN}@nowhere.invalid/d",
    f"postgresql://ann:{HIDDEN}@{HERE}/d",
    f"postgresql+asyncpg://ann:{HIDDEN}@{HERE}/d",
    f"postgres://ann:{HIDDEN}@{HERE}/d",
    f"POSTGRESQL://ann:{HIDDEN}@{HERE}/d",
    f"mysql+pymysql://ann:{HIDDEN}@{HERE}/d?charset=utf8mb4",
    f"mysql://ann:{HIDDEN}@{HERE}/d",
    f"mssql+pyodbc:///?odbc_connect=DRIVER%3DX%3BUID%3Dann%3BPWD%3D{HIDDEN}",
    f"oracle+oracledb://ann:{HIDDEN}@{HERE}/?service_name=x",
    f"snowflake://ann:{HIDDEN}@acme/d?token={HIDDEN}",
    f"cockroachdb://ann:{HIDDEN}@{HERE}/d?api_key={HIDDEN}",
    f"postgresql+psycopg://ann:{HIDDEN}@{HERE}:port/d",
    f"postgresql:ann:{HIDDEN}@{HERE}/d",
    f"postgresql//ann:{HIDDEN}@{HERE}/d",
    f"postgresql+psycopg://ann:x\n{HIDDEN}@{HERE}/d",
    f"sqlite:///file:known.db?uri=true&key={HIDDEN}",
    f"sqlite:///file:known.db?uri=true&api_key={HIDDEN}&access_key={HIDDEN}",
]
TASK = """
import bsearch
def Points(setup: bsearch.TrialSetup):
    yield bsearch.Measurement(setup.samples_budget, 0.1, accuracy=0.5)
"""


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.py").write_text(TASK)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def written(folder: Path) -> str:
    """All texts that commands wrote, but for the study file and the database, which is where it points."""
    return "\n".join(
        path.read_text(errors="replace")
        for path in folder.rglob("*")
        if path.is_file()
        and path.suffix in (".json", ".csv", ".html", ".log", ".sh", ".sbatch", ".txt", ".svg")
    )


@pytest.mark.parametrize("number", range(len(URLS)))
def test_no_place_shows_a_secret(attack, places: Path, number: int) -> None:  # type: ignore[no-untyped-def]
    url = URLS[number]
    study = small_study(
        task="tasks.py:Points", budget={"trials": 2}, training={"samples": 400, "evaluations": 1}, storage=url
    )
    Path("study.yaml").write_text(yaml.safe_dump(study))
    commands = [
        ["run", "study.yaml", "--serial"],
        ["show", "--json", "--", url],
        ["submit", "study.yaml", "--launcher", "slurm", "--dry-run"],
        ["submit", "study.yaml", "--launcher", "ray", "--dry-run"],
    ]
    if url.startswith("sqlite"):  # with results
        commands += [
            ["check", "study.yaml"],
            ["export", "study.yaml", "--to", "json"],
            ["report", "study.yaml"],
        ]
        commands += [
            ["check", "study.yaml", "--machine"],
            ["ask", "study.yaml"],
            ["export", "study.yaml", "--to", "tensorboard"],
        ]
        commands += [["show", "study.yaml", "--pick", "1"], ["export", "study.yaml", "--to", "optuna"]]
    for command in commands:
        with attack(f"{command[0]} {url!r}"):
            assert HIDDEN not in CliRunner().invoke(main, command).output
    with attack(f"Study {url!r}"):
        try:
            assert HIDDEN not in repr(bsearch.Study(url))
        except Exception as error:
            assert HIDDEN not in str(error)
    with attack(f"files {url!r}"):
        assert HIDDEN not in written(places)
