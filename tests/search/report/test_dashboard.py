"""The dashboard: what it serves, to whom, and what a person sees in a browser."""

from __future__ import annotations

import csv
import http.client
import json
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from bsearch.cli import main
from bsearch.search.report.notes import code, code_block, escaped, trial_note
from bsearch.search.report.optuna_view import copy_now
from bsearch.search.store.stored import StoredStudy
from bsearch.spaces.errors import BsearchError
from bsearch.spaces.front import ParetoFront
from bsearch.spaces.record import TrialFacts, TrialRecord
from click.testing import CliRunner
from conftest import TASKS, small_study
from helpers import SPACE, finished
from helpers import bsearch as invoked
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("optuna_dashboard")

# A loss that counts, one that diverges, one that raises, one that no rule allows.
BASELINE = [
    {"effective_batch": batch, "reference_rate": 0.02, "rule": rule, "epochs": 2}
    for batch, rule in ((32, "sqrt"), (33, "sqrt"), (35, "sqrt"), (399, "adam_sde"))
]


def bsearch(*arguments: object) -> str:
    result = invoked(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study file whose study has run, with trials of every fate."""
    path = tmp_path_factory.mktemp("fates") / "study.yaml"
    space = {
        "effective_batch": {"low": 8, "high": 400},
        "reference_rate": {"low": 1e-3, "high": 1e-1, "at_batch": 32},
        "rule": ["adam_sde", "sqrt"],
        "epochs": {"low": 1, "high": 3},
    }
    study = small_study(task=f"{TASKS}:EveryFate", space=space, baseline=BASELINE, budget={"trials": 12})
    path.write_text(yaml.safe_dump(study))
    bsearch("run", path, "--serial")
    return path


@pytest.fixture
def study(begun: Path, tmp_path: Path) -> Path:
    """That study, for one test to change."""
    return Path(shutil.copytree(begun.parent, tmp_path / "study")) / "study.yaml"


@contextmanager
def served(study: Path, *options: str) -> Iterator[str]:
    """The address of the study's page, while its dashboard runs."""
    command = [sys.executable, "-m", "bsearch", "dashboard", str(study), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None and server.stderr is not None
            line = server.stdout.readline()
            assert "http://127.0.0.1:" in line, server.stderr.read()
            yield line.split(": ")[1].split()[0]
        finally:
            server.send_signal(signal.SIGINT)
            errors = server.communicate(timeout=100)[1]
        assert (server.returncode, errors) == (0, "")


def asked(
    address: str, path: str, method: str = "GET", body: Any = None, **headers: str
) -> tuple[int, Any, Any]:
    """Status, headers and document of an answer."""
    text = None if body is None else json.dumps(body)
    with closing(http.client.HTTPConnection(address.split("/")[2], timeout=60)) as connection:
        connection.request(method, path, text, {"Content-Type": "application/json", **headers})
        with connection.getresponse() as answer:
            return answer.status, answer.headers, answer.read().decode()


def study_document(address: str, query: str = "") -> dict[str, Any]:
    status, _, text = asked(address, "/api/studies/1" + query)
    assert status == 200, text
    return dict(json.loads(text))


@pytest.mark.slow
def test_the_study_is_served_with_its_names_its_front_and_its_fates(study: Path) -> None:
    front = [int(row["trial"]) for row in csv.DictReader(bsearch("export", study).splitlines())]
    records = StoredStudy.open(str(study)).records
    with served(study) as address:
        assert address.endswith("/dashboard/studies/1")
        document = study_document(address)
        assert document["name"] == "small"
        assert document["directions"] == ["minimize", "maximize"]
        assert document["objective_names"] == ["train_s", "accuracy"]
        assert {trial["number"] for trial in document["best_trials"]} == set(front)
        trials = {trial["number"]: trial for trial in document["trials"]}
        assert [trials[number]["state"] for number in range(4)] == ["Complete", "Pruned", "Fail", "Pruned"]
        for record in records:
            feasible = all(one <= 0 for one in trials[record.number]["constraints"])
            assert feasible == (record.outcome not in ("diverged", "infeasible")), record
        notes = [trials[number]["note"]["body"] for number in range(4)]
        assert "accuracy" in notes[0]
        assert notes[1].startswith("**Diverged**: `train_loss was not finite after 33 of")
        assert notes[2].startswith("**Failed**: ``") and "Traceback (most recent call last)" in notes[2]
        assert notes[3].startswith("**Infeasible**, not trained: `rule adam_sde: expected kappa")
        url = f"'sqlite:///{study.parent}/small.db#small'"
        assert f"bsearch export {url} --to hf --pick {front[0]}`" in trials[front[0]]["note"]["body"]
        note = document["note"]["body"]
        assert f"## small: 12 of 12 trials, {len(front)} on the front" in note
        assert "Best accuracy: " in note and "- Baseline (trial 0" in note
        assert f"bsearch export {url} --to hf" in note


@pytest.mark.long
def test_what_a_person_wrote_stays_and_disturbs_no_driver(study: Path) -> None:
    with served(study) as address:
        document = study_document(address)
        mine = {"body": "mine", "version": document["note"]["version"] + 1}
        assert asked(address, "/api/studies/1/note", "PUT", mine)[0] == 204
        first = {"body": "", "version": document["trials"][1]["note"]["version"] + 1}
        assert asked(address, "/api/studies/1/2/note", "PUT", first)[0] == 204
        bsearch("run", study, "--serial", "--trials", "14")  # beside the dashboard
    with served(study) as address:
        document = study_document(address)
        bodies = [trial["note"]["body"] for trial in document["trials"]]
        assert len(bodies) >= 14
        assert (document["note"]["body"], bodies[1]) == ("mine", "")  # taken away on purpose
        assert bodies[2].startswith("**Failed**") and bodies[-1].startswith("**")


@pytest.mark.long
def test_older_studies_and_those_of_others_are_served_too(study: Path) -> None:
    with closing(sqlite3.connect(study.parent / "small.db")) as database, database:
        database.execute("DELETE FROM study_system_attributes")
    optuna.create_study(study_name="another", storage=f"sqlite:///{study.parent}/small.db").add_trial(
        optuna.trial.create_trial(value=1.0)
    )
    with served(study) as address:
        document = study_document(address)
        assert document["objective_names"] == ["train_s", "accuracy"]
        assert document["note"]["body"].startswith("## small: 12 of 12")
        another = json.loads(asked(address, "/api/studies/2")[2])
        assert (another["name"], another["note"]["body"], len(another["best_trials"])) == ("another", "", 1)


@pytest.mark.long
def test_a_study_without_a_copy_gets_one(study: Path) -> None:
    optuna.delete_study(study_name="small", storage=f"sqlite:///{study.parent}/small.db")
    bsearch("show", study)  # nothing else needs it
    with served(study) as address:
        number = address.rpartition("/")[2]
        document = json.loads(asked(address, f"/api/studies/{number}")[2])
        assert len(document["trials"]) == len(StoredStudy.open(str(study)).records)


@pytest.mark.long
def test_pages_of_other_sites_and_changes_of_trials_are_refused(study: Path) -> None:
    with served(study) as address:
        base = address.split("/dashboard")[0]
        note = {"body": "theirs", "version": study_document(address)["note"]["version"] + 1}
        # A name that was made to point here.
        assert asked(address, "/api/studies/1", Host="evil.example:8080")[0] == 403
        assert asked(address, "/api/studies/1", Host="localhost:9000")[0] == 200  # through a tunnel
        assert asked(address, "/api/studies/1/note", "PUT", note, Origin="http://evil.example")[0] == 403
        assert asked(address, "/api/studies/1/note", "PUT", note, Origin="null")[0] == 403
        for path, method in (
            ("/api/studies/1", "DELETE"),
            ("/api/studies", "POST"),
            ("/api/studies/1/rename", "POST"),
            ("/api/trials/1/tell", "POST"),
            ("/api/trials/1/user-attrs", "POST"),
        ):
            status, _, text = asked(address, path, method, {})
            assert (status, "only notes can be written" in text) == (403, True), path
        assert asked(address, "/api/studies/1/note", "PUT", note, Origin=base)[0] == 204
    assert StoredStudy.open(str(study)).records


@pytest.mark.slow
def test_a_port_that_is_taken_is_told(study: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = CliRunner().invoke(main, ["dashboard", str(study), "--port", str(port)])
    assert result.exit_code == 1
    assert f"port {port}: Address already in use. Choose another port, or 0" in result.output


# ---------------------------------------------------------------- notes

MARKUP = st.text(alphabet=st.sampled_from(list("`*_[]()<>#+-=!|~$&\\.:/@1aw \n\t")), max_size=40) | st.text(
    max_size=20
)


def inline(text: str) -> list[Any]:
    """What a renderer makes of a line: its one paragraph's parts."""
    from markdown_it import MarkdownIt

    blocks = [
        block
        for block in MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)
        if block.level <= 1
    ]
    assert [block.type for block in blocks] == ["paragraph_open", "inline", "paragraph_close"], text
    return list(blocks[1].children or [])


@given(MARKUP.filter(str.strip))
@example("://")
@example("see https://example.org or WWW.example.org, me@example.org")
def test_texts_of_strangers_stay_texts(text: str) -> None:
    line = " ".join(escaped(text).split())
    if not line:
        return
    parts = inline(line)
    assert {part.type for part in parts} <= {"text", "text_special"}, parts
    shown = "".join(part.content for part in parts)
    assert "://" not in shown and "www." not in shown


@given(MARKUP.filter(lambda text: bool(" ".join(text.split()))))
def test_code_shows_a_text_as_it_is(text: str) -> None:
    from bsearch.spaces.errors import plain

    line = " ".join(plain(text).split())
    if line:
        (part,) = inline(code(text))
        assert (part.type, part.content) == ("code_inline", line)


@given(MARKUP)
def test_no_line_ends_a_block_of_code(text: str) -> None:
    from markdown_it import MarkdownIt

    blocks = MarkdownIt("commonmark").parse(code_block(f"first\n{text}"))
    assert [block.type for block in blocks] == ["fence"]


@pytest.mark.parametrize(
    ("outcome", "facts", "words"),
    [
        ("stopped", {}, "**Stopped** early: unlikely to reach the front at its training time. `why`"),
        ("interrupted", {}, "**Interrupted**; the study's next run goes on with it."),
        ("out_of_memory", {}, "**Out of memory**, with no smaller plan left to try: `why`"),
        ("running", {}, "**Running.**"),
        (
            "complete",
            {"repeats": 3, "seed": 1},
            "**Repeats trial 3 with seed 1**: accuracy 0.9 in 2 s of training.",
        ),
    ],
)
def test_a_note_tells_how_a_trial_came_out(outcome: Any, facts: dict[str, Any], words: str) -> None:
    record = TrialRecord(7, outcome, {"reference_rate": 0.02}, TrialFacts.of(facts), 2.0, 0.9, "why")
    assert trial_note(record, ParetoFront(()), study="study.yaml") == words + "\n"


# ---------------------------------------------------------------- in a browser


@contextmanager
def plain_dashboard(url: str) -> Iterator[str]:
    """The address of a page of optuna-dashboard itself, which knows nothing of bsearch."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        Path(sys.executable).parent / "optuna-dashboard",
        url,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            address, limit = f"http://127.0.0.1:{port}/dashboard/studies/1", time.monotonic() + 60
            while True:
                with suppress(OSError):
                    asked(address, "/api/studies")
                    break
                assert time.monotonic() < limit
                time.sleep(0.1)
            yield address
        finally:
            server.terminate()


@pytest.mark.browser
def test_a_person_sees_names_fates_and_notes_in_plain_optuna_dashboard(study: Path, tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium on the PATH")
    faults: list[str] = []
    url = f"sqlite:///{study.parent}/small.db"
    with plain_dashboard(url) as address, playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: faults.append(str(error)))

        def see(text: str) -> None:
            playwright.expect(page.get_by_text(text).first).to_be_visible(timeout=120_000)

        page.goto(address)
        see("Pareto Front")
        for name in ("train_s", "accuracy"):
            see(name)
        page.screenshot(path=tmp_path / "study.png")

        page.goto(f"{address}/trials?numbers=2")
        see("Failed")
        see("Traceback (most recent call last)")
        see("<img src=x onerror=alert(1)>")
        assert page.locator("img").count() == page.get_by_role("link", name="a link").count() == 0
        assert page.get_by_role("heading", name="Heading").count() == 0
        # No long message makes the page wider than the window.
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280
        page.screenshot(path=tmp_path / "failed.png")

        page.goto(f"{address}/trials?numbers=3")
        see("Infeasible")
        see("rule adam_sde: expected kappa")
        page.screenshot(path=tmp_path / "infeasible.png")

        page.goto(f"{address}/note")
        see("small: 12 of 12 trials")
        see("Best accuracy")
        page.screenshot(path=tmp_path / "note.png")
        browser.close()
    assert faults == []


RATES = {"reference_rate": {"low": 1e-3, "high": 1e2, "at_batch": 32}, "rule": "constant", "epochs": 1}
LOSS = {"metric": {"name": "val_loss", "direction": "minimize"}}
# Trial 5 blows up.
BLOWS_UP = {
    "task": f"{TASKS}:blows_up",
    "space": {"effective_batch": {"low": 8, "high": 64}, **RATES},
    "objectives": LOSS,
    "training": {"samples": 640, "evaluations": 2},
    "baseline": [
        {
            "effective_batch": 8 + index * 7 % 48,
            "reference_rate": 0.5 if index == 5 else 0.02 * 1.3 ** (index * 5 % 16),
        }
        for index in range(16)
    ],
    "budget": {"trials": 16},
    "stopping": "none",
}
STATES: dict[str, dict[str, Any]] = {
    "blow-up": BLOWS_UP,
    "pause": {
        "task": f"{TASKS}:Points",
        "space": {
            **SPACE,
            "effective_batch": {"low": 16, "high": 64},
            "reference_rate": {"low": 0.01, "high": 1},
        },
        "training": {"evaluations": 10},
        "budget": {"hours": 0.003},
    },
    "retry": {"task": f"{TASKS}:SmallMemory", "space": {**SPACE, "effective_batch": {"low": 60, "high": 80}}},
    "kill": {"task": f"{TASKS}:Slow", "space": SPACE, "budget": {"trials": 60}, "stopping": "none"},
    "seeds": {"task": f"{TASKS}:Points", "space": SPACE, "budget": {"trials": 8}, "confirm": 2},
    "minimised": {**BLOWS_UP, "baseline": BLOWS_UP["baseline"][:5], "budget": {"trials": 5}},
}


def is_between(path: Path) -> bool:
    """Whether a trial is complete and another trains."""
    with suppress(BsearchError):  # until it is there
        records = StoredStudy.open(str(path)).records
        return any(record.outcome == "complete" for record in records) and any(
            not record.has_ended for record in records
        )
    return False


def run_until(state: str, path: Path) -> None:
    """Run the study of a state; that of a kill until it is killed in the middle of its second trial."""
    if state != "kill":
        bsearch("run", path, "--serial")
        return
    command = [sys.executable, "-m", "bsearch", "run", path, "--serial"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        limit = time.monotonic() + 120
        while not is_between(path):
            assert running.poll() is None and time.monotonic() < limit
            time.sleep(0.1)
        running.kill()


def shown_states(state: str, records: Sequence[TrialRecord]) -> set[str]:
    """What the dashboard says of the trials of a state, after a check that the study came to it."""
    outcomes = {record.outcome for record in records}
    match state:
        case "blow-up":
            assert [record.number for record in records if record.facts.blew_up] == [5]
            return {"Complete"}
        case "pause":
            assert "paused" in outcomes
            return {"Complete", "Running"}
        case "retry":
            assert any((record.facts.attempts or 0) > 1 for record in records)
        case "kill":
            assert "complete" in outcomes and any(not record.has_ended for record in records)
            return {"Complete", "Running"}
        case "seeds":
            assert any(record.is_repeat for record in records)
    return {"Complete"}


def test_the_copy_that_a_run_has_kept_is_opened_after_a_blow_up(study_file: Callable[..., Path]) -> None:
    path = study_file(**BLOWS_UP)
    bsearch("run", path, "--serial")  # which keeps the copy, while no trial is known to have blown up
    stored = StoredStudy.open(str(path))
    assert shown_states("blow-up", stored.records) == {"Complete"}
    copy_now(stored).close()
    study = optuna.load_study(study_name="small", storage=stored.url)
    assert study.trials[5].values == list(stored.records[5].values or ())
    assert {trial.number for trial in study.best_trials} == {trial.number for trial in stored.front.trials}


@pytest.mark.browser
@pytest.mark.parametrize(
    "state",
    [pytest.param(state, marks=[pytest.mark.long] * (state != "kill")) for state in STATES],
)
def test_the_dashboard_opens_in_every_state(
    state: str, study_file: Callable[..., Path], tmp_path: Path
) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium on the PATH")
    path = study_file(**STATES[state])
    run_until(state, path)
    shown = shown_states(state, StoredStudy.open(str(path)).records)
    faults: list[str] = []
    with served(path) as address, playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(address)
        for text in ("Pareto Front", "train_s"):
            playwright.expect(page.get_by_text(text).first).to_be_visible(timeout=120_000)
        page.screenshot(path=tmp_path / "study.png")
        page.goto(f"{address}/trials")
        for text in shown:
            playwright.expect(page.get_by_text(text).first).to_be_visible(timeout=120_000)
        page.screenshot(path=tmp_path / "trials.png")
        if state == "blow-up":
            page.goto(f"{address}/trials?numbers=5")
            playwright.expect(page.get_by_text("blew up").first).to_be_visible(timeout=120_000)
            page.screenshot(path=tmp_path / "blow-up.png")
        page.goto(f"{address}/note")
        playwright.expect(page.get_by_text("on the front").first).to_be_visible(timeout=120_000)
        browser.close()
    assert faults == []


@pytest.mark.browser
def test_a_study_that_runs_is_seen_in_plain_optuna_dashboard(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium on the PATH")
    path = study_file(task=f"{TASKS}:Slow", space=SPACE, budget={"trials": 60}, stopping="none")
    command = [sys.executable, "-m", "bsearch", "run", path, "--serial"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        try:
            limit = time.monotonic() + 120
            while not finished(tmp_path / "small.db"):
                assert running.poll() is None and time.monotonic() < limit
                time.sleep(0.1)
            with (
                plain_dashboard(f"sqlite:///{tmp_path}/small.db") as address,
                playwright.sync_playwright() as driver,
            ):
                browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
                page = browser.new_page(viewport={"width": 1280, "height": 900})
                page.goto(f"{address}/trials")
                playwright.expect(page.get_by_text("Running").first).to_be_visible(timeout=120_000)
                page.goto(f"{address}/note")
                playwright.expect(page.get_by_text("of 60 trials").first).to_be_visible(timeout=120_000)
                browser.close()
        finally:
            running.send_signal(signal.SIGINT)
