"""Experiment trackers: every trial a run, told once however often it is told, by a process that no trial waits for."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bsearch.extras.tracking.follow import tell
from bsearch.extras.tracking.trackers import TrackedTrial
from bsearch.search.store.rows import MeasurementRow
from bsearch.search.store.stored import StoredStudy
from bsearch.spaces.errors import StudyFileError
from bsearch.spaces.record import TrialFacts, TrialRecord
from bsearch.spaces.study.file import study_from_dict
from conftest import BSEARCH, TASKS, small_study
from helpers import SPACE, bsearch

FACTS = TrialFacts(effective_batch=8, betas=(0.9, 0.99), samples_budget=100, seed=1, peak_bytes=5)


def rows(*points: tuple[int, float]) -> tuple[MeasurementRow, ...]:
    row = {"number": 3, "attempt": 0, "train_loss": None, "scores": '{"val_loss": null}'}
    return tuple(
        MeasurementRow.of({**row, "samples_seen": at, "elapsed_s": at / 100, "accuracy": value})
        for at, value in points
    )


def test_a_curve_that_was_measured_twice_is_told_once() -> None:
    record = TrialRecord(3, "complete", {"width": 7, "effective_batch": 8}, FACTS, 1.5, 0.9)
    trial = TrackedTrial(
        record, "accuracy", rows((10, 0.1), (20, 0.2), (10, 0.1), (20, 0.2), (30, 0.3)), True
    )
    assert [at for at, _ in trial.points()] == [10, 20, 30]
    assert list(trial.points(20)) == [(30, {"elapsed_s": 0.3, "accuracy": 0.3})]
    derived = replace(record, parameters={"weight_decay": 0.1}, facts=TrialFacts(weight_decay=0.4))
    assert replace(trial, record=derived).parameters["weight_decay"] == 0.4  # as the rule made it
    assert trial.parameters == {
        "effective_batch": 8,
        "samples_budget": 100,
        "seed": 1,
        "betas": "[0.9, 0.99]",
        "width": 7,
    }
    assert trial.results == {"peak_bytes": 5.0, "accuracy": 0.9}
    assert trial.ended and not replace(trial, record=replace(record, outcome="running")).ended


@pytest.mark.parametrize(
    ("tracking", "message"),
    [
        (
            "mlfow",
            "tracking: expected one of mlflow, wandb, tensorboard; got 'mlfow'. Did you mean 'mlflow'?",
        ),
        (3, "got 3"),
    ],
)
def test_an_unknown_tracker_is_told(tracking: Any, message: str) -> None:
    with pytest.raises(StudyFileError) as told:
        study_from_dict(small_study(tracking=tracking))
    assert message in str(told.value)
    assert study_from_dict(small_study(tracking="wandb")).tracking == ("wandb",)


def test_one_that_is_not_installed_is_told(
    study_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = study_file(task=f"{TASKS}:Points", budget={"trials": 1, "profile_s": 0})
    assert bsearch("run", path, "--serial").exit_code == 0
    monkeypatch.setitem(sys.modules, "mlflow", None)
    told = bsearch("export", path, "--to", "mlflow")
    assert told.exit_code == 2
    assert "tracking: mlflow is not installed. Run pip install mlflow" in told.output


# ---------------------------------------------------------------- the trackers themselves

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> StoredStudy:
    import yaml

    folder = tmp_path_factory.mktemp("tracked")
    space = {
        "effective_batch": {"low": 8, "high": 300},
        "reference_rate": {"low": 0.001, "high": 0.5},
        "epochs": 2,
    }
    made = small_study(
        task=f"{TASKS}:ManyFates",
        space=space,
        budget={"trials": 8, "profile_s": 0},
        training={"evaluations": 3},
    )
    (folder / "study.yaml").write_text(yaml.safe_dump(made))
    assert bsearch("run", folder / "study.yaml", "--serial").exit_code == 0
    return StoredStudy.open(str(folder / "study.yaml"))


@pytest.fixture(autouse=True)
def own_places(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("MLFLOW_", "WANDB_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    return


def mlflow_runs(folder: Path) -> list[Any]:
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    (experiment,) = [one for one in client.search_experiments() if one.name != "Default"]
    return list(client.search_runs([experiment.experiment_id]))


@pytest.mark.frameworks
def test_mlflow_has_every_trial_once(study: StoredStudy, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    for _ in range(2):
        (told,) = tell(study, ["mlflow"], tmp_path)
        assert (told.trials, told.left, told.error) == (len(study.records), 0, "")
    runs = {int(run.data.tags["bsearch.trial"]): run for run in mlflow_runs(tmp_path)}
    assert sorted(runs) == [record.number for record in study.records]
    front = {record.number for record in study.front.trials}
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    for record in study.records:
        run = runs[record.number]
        assert run.data.tags["bsearch.outcome"] == record.outcome
        assert run.data.tags["bsearch.front"] == str(record.number in front).lower()
        assert run.info.status == ("FINISHED" if record.counts else "FAILED")
        if record.outcome == "complete":
            assert float(run.data.params["learning_rate"]) == record.facts.learning_rate
            curve = client.get_metric_history(run.info.run_id, "accuracy")
            assert len(curve) == 3
            assert curve[-1].value == pytest.approx(record.accuracy)
            assert run.data.metrics["train_s"] == pytest.approx(record.train_s)


@pytest.mark.frameworks
def test_what_one_trial_is_called_and_what_a_stranger_has_stay_apart(
    study: StoredStudy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    # Another study of the same name, in the same place.
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    other = client.create_experiment(study.name)
    for number in range(3):
        client.create_run(
            other, tags={"bsearch.trial": str(number), "bsearch.study": "0123", "bsearch.outcome": "complete"}
        )
    monkeypatch.setattr(TrackedTrial, "results", {"recall@5": 1.0})
    (told,) = tell(study, ["mlflow"], tmp_path)
    assert (told.trials, told.left, told.error) == (len(study.records), 0, "")
    runs = mlflow_runs(tmp_path)
    assert len(runs) == len(study.records) + 3
    assert any("recall_5" in run.data.metrics for run in runs)
    # A password in an address stays out of what is said.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://alice:s3cret@127.0.0.1:9")
    (down,) = tell(study, ["mlflow"], tmp_path)
    assert down.left == len(study.records) and "s3cret" not in down.sentence


@pytest.mark.frameworks
def test_tensorboard_and_wandb_have_every_trial_once(study: StoredStudy, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for _ in range(2):
        for told in tell(study, ["tensorboard", "wandb"], tmp_path):
            assert (told.trials, told.left, told.error) == (len(study.records), 0, "")
    folders = sorted((tmp_path / "tensorboard").iterdir())
    assert len(folders) == len(study.records) == len(list((tmp_path / "wandb").glob("offline-run-*")))
    best = max((one for one in study.records if one.outcome == "complete"), key=lambda one: one.accuracy or 0)
    read = events.EventAccumulator(str(folders[best.number]))
    read.Reload()
    assert [one.value for one in read.Scalars("accuracy")][-1] == pytest.approx(best.accuracy)
    assert len(read.Scalars("accuracy")) == 3


@pytest.mark.long
def test_a_run_tells_trackers_as_it_goes_and_does_not_wait_for_one_that_is_down(
    study_file: Callable[..., Path],
) -> None:
    pytest.importorskip("mlflow")
    path = study_file(
        task=f"{TASKS}:Slow",
        space=SPACE | {"effective_batch": 40},
        budget={"trials": 400, "profile_s": 0},
        training={"evaluations": 5},
        tracking=["mlflow"],
    )
    process = subprocess.Popen(
        [BSEARCH, "run", path, "--serial"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    database = path.parent / "results" / "small" / "mlflow.db"
    limit = time.monotonic() + 200
    while not _finished(database):
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.5)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    # The study goes on while no tracker can be reached.
    done = sum(record.has_ended for record in StoredStudy.open(str(path)).records)
    path.write_text(path.read_text().replace("trials: 400", f"trials: {done + 2}"))
    environment = {**os.environ, "MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}
    ran = subprocess.run(
        [BSEARCH, "run", path, "--serial"], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout
    assert "trials not sent (MlflowException" in ran.stdout
    # Later everything is there, each trial once.
    assert bsearch("export", path, "--to", "mlflow").exit_code == 0
    known = StoredStudy.open(str(path))
    numbers = sorted(int(run.data.tags["bsearch.trial"]) for run in mlflow_runs(database.parent))
    assert numbers == [record.number for record in known.records]


def _finished(database: Path) -> bool:
    """Whether a run is finished, by a look that changes nothing: MLflow's own client would create the tables it misses."""
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=5)
        ) as connection:
            return bool(
                connection.execute("select count(*) from runs where status = 'FINISHED'").fetchone()[0]
            )
    except sqlite3.Error:
        return False  # it is being created


@pytest.mark.browser
@pytest.mark.frameworks
@pytest.mark.long
def test_a_person_finds_the_trials_in_mlflow(study: StoredStudy, tmp_path: Path) -> None:
    pytest.importorskip("mlflow.server")
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium on the PATH")
    tell(study, ["mlflow"], tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    store = ["--backend-store-uri", f"sqlite:///{tmp_path / 'mlflow.db'}"]
    server = subprocess.Popen(
        [*command, *store],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        limit = time.monotonic() + 200
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < limit
                time.sleep(0.5)
        with playwright.sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1400, "height": 900})
            experiment = mlflow_runs(tmp_path)[0].info.experiment_id
            page.goto(f"http://127.0.0.1:{port}/#/experiments/{experiment}/runs")
            for record in study.records[:3]:
                playwright.expect(page.get_by_text(f"trial {record.number}", exact=True).first).to_be_visible(
                    timeout=120_000
                )
            page.screenshot(path=tmp_path / "mlflow.png")
            browser.close()
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()
