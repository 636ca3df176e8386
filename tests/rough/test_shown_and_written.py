"""What is written and shown of a study whose names and numbers a stranger chose: tables, settings, pages, answers."""

from __future__ import annotations

import csv
import http.client
import io
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import BATCH_AND_RATE
from helpers import bsearch as run
from tiny import POINTS, in_words

KIND = "names and numbers of strangers, written and shown"
pytestmark = pytest.mark.long
BSEARCH = Path(sys.executable).parent / "bsearch"
STUDY: dict[str, Any] = {
    "study": "small",
    "task": "tasks.py:Points",
    "space": {
        **BATCH_AND_RATE,
        "width": {"low": 0.5, "high": 2.0},
        "name": {"choices": ["a", "b"]},
    },
    "sampler": "random",
    "stopping": "none",
    "training": {"evaluations": 2},
    "budget": {"trials": 3, "profile_s": 0},
}
RETURNS = "        return Data("
TASK = POINTS.replace(RETURNS, f"        setup.parameters['width'], setup.parameters['name']\n{RETURNS}")


def written(folder: Path, study: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tasks.py").write_text(TASK)
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(study, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = written(tmp_path_factory.mktemp("finished"), STUDY)
    in_words(run("run", path, "--serial"), 0)
    return path.parent


def renamed(finished: Path, folder: Path, **parameters: Any) -> Path:
    """The study, with parameters of these names and values in each of its trials."""
    shutil.copytree(finished, folder, ignore=shutil.ignore_patterns("results", "__pycache__"))
    with closing(sqlite3.connect(folder / "small.db")) as database, database:
        for number, text in database.execute("SELECT number, parameters FROM bsearch_trial").fetchall():
            changed = json.dumps(json.loads(text) | parameters)
            database.execute("UPDATE bsearch_trial SET parameters = ? WHERE number = ?", (changed, number))
        for number, text in database.execute("SELECT number, setup FROM bsearch_attempt").fetchall():
            setup = json.loads(text)
            changed = json.dumps(setup | {"parameters": setup["parameters"] | parameters})
            database.execute("UPDATE bsearch_attempt SET setup = ? WHERE number = ?", (changed, number))
    return folder / "study.yaml"


NAMES = [
    "=1+1",
    "+cmd|' /C calc'!A0",
    "-2",
    "@SUM(A1)",
    "\t=1",
    "a\x1b[31mred",
    "evil\u202egnp",
    "two\nlines",
    'quo"te',
    "a,b",
]
# What a terminal interprets, beside line ends, which quotes hold together.
CONTROL = {"\x1b", "\u202e", "\u2066", "\r"}


def test_no_cell_begins_a_formula_whatever_a_parameter_is_called(
    attack: Any, finished: Path, tmp_path: Path
) -> None:
    for place, name in enumerate(NAMES):
        path = renamed(finished, tmp_path / str(place), **{name: name})
        with attack(f"CSV: {name!r}"):
            text = in_words(run("export", path, "--all"), 0)
            rows = list(csv.reader(io.StringIO(text)))
            assert len({len(row) for row in rows}) == 1 and len(rows) == 4
            assert not [cell for cell in rows[0] if cell.startswith(("=", "+", "-", "@", "\t"))]
            assert not CONTROL & set(text)
        with attack(f"YAML: {name!r}"):
            text = in_words(run("export", path, "--to", "yaml", "--pick", "best"), 0)
            assert not CONTROL & set(text), text
            assert yaml.safe_load(text[text.index("study:") :])["parameters"][name] == name


NUMBERS = [
    "1e-320",
    "-1e-320",
    "5e-324",
    "1e308",
    "-1e308",
    "1e-200",
    "1e200",
    "9223372036854775807",
    "0.0",
    "-0.0",
]
PLACES: list[tuple[str, ...]] = [
    ("space", "width", "step"),
    ("space", "width", "low"),
    ("space", "width", "high"),
    ("space", "reference_rate", "low"),
    ("space", "reference_rate", "high"),
    ("space", "epochs"),
    ("space", "weight_decay"),
    ("space", "name", "choices"),
    ("training", "warmup"),
    ("training", "clip_norm"),
    ("training", "eps"),
    ("training", "ema"),
    ("budget", "hours"),
    ("budget", "profile_s"),
    ("cluster", "checkpoint_every_s"),
    ("objectives", "metric", "floor"),
]


def test_numbers_whose_quotients_are_none_are_refused_by_name_or_used(attack: Any, tmp_path: Path) -> None:
    path = written(tmp_path / "numbers", STUDY)
    for place in PLACES:
        for number in NUMBERS:
            study = json.loads(json.dumps(STUDY))
            inner = study
            for key in place[:-1]:
                inner = inner.setdefault(key, {})
            inner[place[-1]] = ["NUMBER", 1] if place[-1] == "choices" else "NUMBER"
            path.write_text(yaml.safe_dump(study, sort_keys=False).replace("NUMBER", number))
            with attack(f"{'.'.join(place)}: {number}"):
                said = in_words(run("show", path), 1, 2)  # there is no database, so at most the file is read
                assert "no such database" in said or "study.yaml:" in said, said
    wide = ({"low": 0, "high": 1, "step": 1e-13}, {"low": -1e99, "high": 1e99}, {"low": 1e-99, "high": 1e-98})
    changed = {**STUDY, "sampler": "front", "budget": {"trials": 8, "profile_s": 0}}
    for index, width in enumerate(wide):
        path = written(tmp_path / str(index), {**changed, "space": {**STUDY["space"], "width": width}})
        with attack(f"run with width {width}"):
            in_words(run("run", path, "--serial"))


@pytest.fixture
def dashboard(finished: Path, tmp_path: Path) -> Iterator[tuple[int, Path, Path]]:
    """The port of a served dashboard, its database, and what it prints."""
    folder = shutil.copytree(
        finished, tmp_path / "served", ignore=shutil.ignore_patterns("results", "__pycache__")
    )
    said = tmp_path / "said"
    with said.open("w") as errors:
        command = [BSEARCH, "dashboard", folder / "study.yaml", "--port", "0"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=dict(os.environ)
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            yield int(line.split("127.0.0.1:")[1].split("/")[0]), folder / "small.db", said
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(20)
            process.stdout.close()


def test_the_dashboard_fails_in_words_and_in_no_frame(attack: Any, dashboard: tuple[int, Path, Path]) -> None:
    pytest.importorskip("optuna_dashboard")
    port, database, said = dashboard

    def answered(path: str) -> tuple[int, str, str]:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            policies = response.headers.get_all("Content-Security-Policy") or []
            return response.status, response.read().decode(errors="replace"), "; ".join(policies)

    paths = ("/dashboard", "/api/studies", "/api/studies/1", "/api/studies/77", "/csv/1", "/nothing")
    for path in paths:
        with attack(f"{path} in a frame of another site"):
            assert "frame-ancestors 'none'" in answered(path)[2]
    with closing(sqlite3.connect(database)) as spoiled, spoiled:
        spoiled.execute("DROP TABLE trials")
        spoiled.execute("DROP TABLE study_user_attributes")
    for path in paths:
        with attack(f"{path} without Optuna's tables"):
            status, text, _ = answered(path)
            assert "Traceback" not in text and "sqlalchemy" not in text.lower(), text
            assert status < 500 or "bsearch show" in text, text
    with attack("nothing on the terminal"):
        assert "Traceback" not in said.read_text(), said.read_text()


def test_a_report_of_long_names_fits_a_telephone(attack: Any, finished: Path, tmp_path: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium here")
    words = {
        "a_name_" * 8: "another_very_long_name_" * 4,
        "sentence": "many words with spaces between them that go on " * 4,
    }
    path = renamed(finished, tmp_path / "long", **words)
    in_words(run("report", path, "--out", tmp_path / "report.html"), 0)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for width in (320, 390, 1280):
            view = browser.new_context(viewport={"width": width, "height": 900}).new_page()
            view.goto((tmp_path / "report.html").as_uri())
            view.wait_for_selector("#plot-front svg")
            for opens in (False, True):
                with attack(f"{width} pixels, all {'open' if opens else 'closed'}"):
                    view.evaluate(
                        "opens => document.querySelectorAll('details').forEach(part => part.open = opens)",
                        opens,
                    )
                    view.wait_for_timeout(300)
                    assert view.evaluate("document.documentElement.scrollWidth") <= width
        browser.close()
