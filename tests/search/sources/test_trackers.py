"""Runs of W&B, MLflow and TensorBoard: each written by the tracker's own library, and read as it was written."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from bsearch.search.sources.readers import mlflow as mlflow_reader
from bsearch.search.sources.readers import tensorboard as tensorboard_reader
from bsearch.search.sources.readers import wandb as wandb_reader
from bsearch.search.sources.runs import Run
from bsearch.spaces.errors import StudyFileError

pytestmark = pytest.mark.filterwarnings("ignore")  # the trackers' own

LOSSES = {"good": [2.0, 0.5, 1.0], "diverged": [2.0, math.nan, math.nan], "killed": [3.0, 2.5]}
ENDS = {
    "good": {"val_loss": 1.0, "val_loss (lowest)": 0.5, "val_loss (highest)": 2.0},
    "diverged": {
        "val_loss": pytest.approx(math.nan, nan_ok=True),
        "val_loss (lowest)": 2.0,
        "val_loss (highest)": 2.0,
    },
    "killed": {"val_loss": 2.5, "val_loss (lowest)": 2.5, "val_loss (highest)": 3.0},
}


@pytest.fixture(autouse=True)
def own_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("MLFLOW_", "WANDB_")):
            monkeypatch.delenv(name)
    for name in ("ALLOW_FILE_STORE", "DISABLE_TELEMETRY"):
        monkeypatch.setenv(f"MLFLOW_{name}", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    monkeypatch.setenv("HOME", str(tmp_path))  # no key of whoever runs the tests
    monkeypatch.chdir(tmp_path)


def refusal(reader: Any, source: Any) -> str:
    with pytest.raises(StudyFileError) as refused:
        list(reader.read(str(source)))
    return str(refused.value)


@pytest.mark.parametrize("reader", [wandb_reader, mlflow_reader, tensorboard_reader])
def test_a_library_that_is_missing_is_named(reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = reader.__name__.rpartition(".")[2]
    monkeypatch.setitem(sys.modules, name, None)
    for known in [module for module in sys.modules if module.startswith("tensorboard.")]:
        monkeypatch.delitem(sys.modules, known)
    assert refusal(reader, "runs") == (
        f"{name}:runs: expected the package {name} to read it, found none. Install it: pip install {name}"
    )


# ---------------------------------------------------------------- W&B


def write_wandb(folder: Path) -> None:
    wandb = pytest.importorskip("wandb")
    quiet = wandb.Settings(silent=True, x_disable_stats=True, disable_git=True, console="off")
    for number, (name, losses) in enumerate(LOSSES.items()):
        config = {
            "optimizer": {"lr": 0.1, "betas": [0.9, 0.99]},
            "batch_size": 64,
            "nesterov": True,
            "seed": number,
        }
        run = wandb.init(project="p", id=name, dir=str(folder), mode="offline", config=config, settings=quiet)
        for loss in losses:
            run.log({"val_loss": loss, "weights": wandb.Histogram([1, 2])})
        run.config.update({"width": 8})
        run.summary["best"] = "early"
        run.finish(exit_code=int(name == "diverged"))


def wandb_runs(source: Path) -> dict[str, Run]:
    return {run.place.rpartition("-")[2]: run for run in wandb_reader.read(str(source))}


@pytest.mark.slow
def test_logs_of_wandb_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    write_wandb(tmp_path)
    (killed,) = (tmp_path / "wandb").glob("offline-run-*-killed/*.wandb")
    runs, until = wandb_runs(tmp_path / "wandb"), time.monotonic() + 30
    # Its own process writes, later on a busy machine.
    while runs["killed"].status == "running" and time.monotonic() < until:
        time.sleep(0.2)
        runs = wandb_runs(tmp_path / "wandb")
    whole = killed.read_bytes()
    assert [(name, run.status) for name, run in runs.items()] == [
        ("good", "finished"),
        ("diverged", "failed"),
        ("killed", "finished"),
    ]
    for number, (name, run) in enumerate(runs.items()):
        assert run.settings == {
            "optimizer.lr": 0.1,
            "optimizer.betas.0": 0.9,
            "optimizer.betas.1": 0.99,
            "batch_size": 64,
            "nesterov": True,
            "seed": number,
            "width": 8,
        }
        ends = {**ENDS[name], "best": "early", "_step": len(LOSSES[name]) - 1}
        assert {key: value for key, value in run.results.items() if key != "_runtime"} == ends
        assert 0 <= run.results["_runtime"] < 60
    # Neither the end nor the last measurement reached the disk.
    killed.write_bytes(whole[: whole.index(b"\x032.5") + 2])
    cut = wandb_runs(tmp_path)["killed"]
    assert (cut.status, cut.results["val_loss"], cut.settings["batch_size"]) == ("running", 3.0, 64)
    assert wandb_runs(killed.parent)["killed"] == cut
    # Wherever it is cut.
    for end in range(0, len(whole), 97):
        killed.write_bytes(whole[:end])
        assert next(wandb_reader.read(str(killed.parent))).status in ("running", "finished")
    killed.write_bytes(b"something else")
    assert "expected a log of W&B, found another file" in refusal(wandb_reader, killed.parent)


@pytest.mark.slow
@pytest.mark.parametrize("counted", [False, True])
def test_a_run_of_wandb_that_was_resumed_is_one(counted: bool, tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    quiet = wandb.Settings(silent=True, x_disable_stats=True, disable_git=True, console="off")
    for first, losses in ((0, [5.0, 4.0, 0.1]), (2, [2.0, 1.0])):
        how = {"mode": "offline", "resume": "allow", "settings": quiet, "dir": str(tmp_path)}
        run = wandb.init(project="p", id="a1", config={"lr": 0.1}, **how)
        for step, loss in enumerate(losses, start=first):
            run.log({"val_loss": loss}, step=step if counted else None)
        run.finish(exit_code=0 if first else 1)
        (folder,) = (
            path for path in (tmp_path / "wandb").glob("offline-run-*-a1") if "part" not in path.name
        )
        folder.rename(folder.with_name(f"offline-run-2026010{first}_000000-part"))
    run = wandb.init(project="p", id="b2", mode="offline", settings=quiet, dir=str(tmp_path))
    run.finish()
    both, other = wandb_reader.read(str(tmp_path))
    assert (both.place, both.settings, both.status) == (
        f"{tmp_path}/wandb/offline-run-20260100_000000-part and offline-run-20260102_000000-part",
        {"lr": 0.1},
        "finished",
    )
    # The second part of the run that counts its own steps begins before the end of the first; offline, W&B counts from 0.
    low = 1.0 if counted else 0.1
    ends = {
        "val_loss": 1.0,
        "val_loss (lowest)": low,
        "val_loss (highest)": 5.0,
        "_step": 3 if counted else 4,
    }
    assert {name: value for name, value in both.results.items() if name != "_runtime"} == ends
    assert (other.settings, other.results.keys() <= {"_runtime"}) == ({}, True)


@pytest.mark.slow
def test_a_log_of_many_blocks_is_read_whole(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    quiet = wandb.Settings(silent=True, x_disable_stats=True, disable_git=True, console="off")
    run = wandb.init(
        project="p", dir=str(tmp_path), mode="offline", config={"notes": "x" * 100_000}, settings=quiet
    )
    for step in range(2000):
        run.log({"val_loss": 2000 - step, "text": "y" * (step % 50)})
    run.finish()
    (read,) = wandb_reader.read(str(tmp_path))
    assert (len(str(read.settings["notes"])), read.status) == (100_000, "finished")
    assert (read.results["val_loss"], read.results["val_loss (highest)"], read.results["_step"]) == (
        1,
        2000,
        1999,
    )


@pytest.mark.slow
def test_a_project_that_cannot_be_reached_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    assert "found no API key" not in refusal(wandb_reader, "nowhere")
    (tmp_path / "empty").mkdir()
    assert "expected folders named run-* or offline-run-*" in refusal(wandb_reader, "empty")
    assert "no API key. Run `wandb login`" in refusal(wandb_reader, "ann/digits")
    key = "0123456789abcdef" * 3
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    down = refusal(wandb_reader, "ann/digits")
    assert (
        down.startswith("wandb:ann/digits: expected a folder, or a project that the W&B API shows")
        and key not in down
    )


class WandbServer(BaseHTTPRequestHandler):
    """What W&B's server answers to the queries of its own client: runs of the project `digits`, one a page."""

    runs: ClassVar[dict[str, list[dict[str, Any]]]] = {
        "digits": [
            {
                "name": "a1",
                "state": "crashed",
                "config": '{"lr": {"value": 0.1}, "opt": {"value": {"name": "adam"}}, "_wandb": {"value": {"v": 1}}}',
                "summaryMetrics": '{"val_loss": "NaN", "_runtime": 12.5, "_wandb": {"runtime": 12}, '
                '"image": {"_type": "image-file", "size": 3}}',
            },
            {
                "name": "b2",
                "state": "finished",
                "config": '{"lr": {"value": 0.2}}',
                "summaryMetrics": '{"val_loss": 0.5}',
            },
            {"name": "c3", "state": "running", "config": "{}", "summaryMetrics": "{}"},
        ],
        "empty": [],
    }

    def do_GET(self) -> None:
        self._reply({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])) or b"{}"
        asked = json.loads(body) if self.path == "/graphql" else {}
        given = asked.get("variables") or {}
        if "query Runs" not in asked.get("query", ""):
            self._reply(
                {"data": {"viewer": {"id": "1", "entity": "ann", "username": "ann", "teams": {"edges": []}}}}
            )
            return
        if (runs := self.runs.get(given["project"])) is None:
            self._reply({"data": {"project": None}})
            return
        first = int(given["cursor"] or 0)
        edges = [
            {"cursor": str(first + 1), "node": {"projectId": "1", **run}} for run in runs[first : first + 1]
        ]
        page = {"endCursor": str(first + 1), "hasNextPage": first + 1 < len(runs)}
        self._reply(
            {
                "data": {
                    "project": {
                        "runCount": len(runs),
                        "readOnly": False,
                        "runs": {"edges": edges, "pageInfo": page},
                    }
                }
            }
        )

    def _reply(self, document: Any) -> None:
        text = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None: ...


# In a process of its own: the client stays with the server that a process named first.
READ = """
from bsearch.search.sources.readers.wandb import read
from bsearch.spaces.errors import StudyFileError
for project in ("digits", "empty", "other"):
    try:
        print(*((run.place, run.settings, run.results, run.status) for run in read(f"ann/{project}")), sep="\\n")
    except StudyFileError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_project_of_wandb_is_read_by_wandbs_own_client() -> None:
    pytest.importorskip("wandb")
    with ThreadingHTTPServer(("127.0.0.1", 0), WandbServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        known = {
            **os.environ,
            "WANDB_API_KEY": "0123456789abcdef" * 3,
            "WANDB_BASE_URL": url,
            "WANDB_SILENT": "true",
        }
        done = subprocess.run(
            [sys.executable, "-c", READ], env=known, capture_output=True, text=True, timeout=60, check=False
        )
        server.shutdown()
    assert done.stdout.splitlines() == [
        "('ann/digits/a1', {'lr': 0.1, 'opt.name': 'adam'}, {'val_loss': nan, '_runtime': 12.5}, 'failed')",
        "('ann/digits/b2', {'lr': 0.2}, {'val_loss': 0.5}, 'finished')",
        "('ann/digits/c3', {}, {}, 'running')",
        "wandb:ann/empty: expected a project with runs, found none in it. Check the name.",
        "wandb:ann/other: expected a folder, or a project that the W&B API shows; found no such folder, and got: Could not "
        "find project other. Check the name, key and network.",
    ], done.stderr


# ---------------------------------------------------------------- MLflow


def write_mlflow(uri: str, runs: int = 0) -> None:
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(uri)
    experiment = client.create_experiment("digits")
    client.create_experiment("empty")
    for name, losses in LOSSES.items():
        run = client.create_run(experiment, start_time=1_000, tags={"mlflow.runName": name}).info.run_id
        for key, value in {"lr": "1e-3", "batch_size": 64, "optimizer": "adam", "day": "2026_01"}.items():
            client.log_param(run, key, value)
        for step, loss in enumerate(losses):
            client.log_metric(run, "val_loss", loss, step=step)
        client.log_metric(run, "system/disk", 5.0)
        if name != "killed":
            client.set_terminated(run, "FAILED" if name == "diverged" else "FINISHED", end_time=3_500)
    for number in range(runs):
        run = client.create_run(experiment, start_time=1_000).info.run_id
        client.log_metric(run, "val_loss", number)


def mlflow_runs(source: str) -> dict[str, Run]:
    return {run.place.partition(" (")[0]: run for run in mlflow_reader.read(source)}


@pytest.mark.slow
@pytest.mark.parametrize("store", ["sqlite:///{}/mlflow.db", "{}/mlruns", "file://{}/mlruns"])
def test_runs_of_mlflow(store: str, tmp_path: Path) -> None:
    uri = store.format(tmp_path)
    write_mlflow(uri)
    runs = mlflow_runs(f"{uri}#digits")
    assert {name: run.status for name, run in runs.items()} == {
        "good": "finished",
        "diverged": "failed",
        "killed": "running",
    }
    for name, run in runs.items():
        assert run.settings == {"lr": 0.001, "batch_size": 64, "optimizer": "adam", "day": "2026_01"}
        assert run.results == {**ENDS[name], "system/disk": 5.0} | (
            {} if name == "killed" else {"duration_s": 2.5}
        )
    assert "expected runs in the experiment 'empty', found none" in refusal(mlflow_reader, f"{uri}#empty")
    assert "got 'digts'. Did you mean 'digits'?" in refusal(mlflow_reader, f"{uri}#digts")


@pytest.mark.slow
def test_large_experiments_are_read_without_their_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    write_mlflow(uri, runs=3)
    monkeypatch.setattr(mlflow_reader, "_MOST_WITH_CURVES", 5)
    monkeypatch.setattr(mlflow_reader, "_PAGE_RUNS", 2)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    runs = list(mlflow_reader.read("digits"))
    assert len(runs) == 6
    good = mlflow_runs(f"{tmp_path}/mlflow.db#digits")["good"]
    assert good.results == {"val_loss": 1.0, "system/disk": 5.0, "duration_s": 2.5}


@pytest.mark.parametrize(
    ("uri", "is_store"),
    [(uri, True) for uri in ("https://ann@host", "postgresql://host/db", "databricks", "databricks://ann")]
    + [
        (f"{scheme}{name}", name == "runs")
        for scheme in ("", "file:", "file://")
        for name in ("runs", "ucsd", "databricks_")
    ],
)
def test_a_store_is_a_server_or_a_folder_that_is_there(uri: str, is_store: bool) -> None:
    """MLflow would make a folder of any other name."""
    Path("runs").mkdir()
    with nullcontext() if is_store else pytest.raises(StudyFileError, match=f"in {uri}, found no such store"):
        mlflow_reader._check_store("digits", uri)


@pytest.mark.slow
def test_a_store_that_cannot_be_read_is_left_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    with contextlib.closing(sqlite3.connect(tmp_path / "other.db")) as connection:
        connection.execute("create table trials (number integer)")
    (tmp_path / "text.db").write_text("nothing of the kind" * 100)
    before = {path.name: path.stat().st_size for path in tmp_path.glob("*.db")}
    for source in ("digits", "sqlite:///new.db#digits", "new#digits", "sqlite:///other.db#digits"):
        assert "found no such store. Write URI#EXPERIMENT" in refusal(mlflow_reader, source)
    assert "got file is not a database" in refusal(mlflow_reader, "text.db#digits")
    assert {path.name: path.stat().st_size for path in tmp_path.glob("*.db")} == before
    down = refusal(mlflow_reader, "http://ann:s3cret@127.0.0.1:9#digits")
    assert "s3cret" not in down and "expected an experiment that MLflow can read" in down


# ---------------------------------------------------------------- TensorBoard


@pytest.mark.slow
def test_runs_of_tensorboard_with_hyperparameters_below_them(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    hparams = {"lr": 0.1, "batch_size": 64, "optimizer": "adam"}
    for name, losses in LOSSES.items():
        with SummaryWriter(str(tmp_path / name)) as writer:
            for step, loss in enumerate(losses):
                writer.add_scalar("val_loss", loss, step)
            if name != "killed":
                # "good" below the run, as torch does by itself; "diverged" into its own folder.
                writer.add_hparams(hparams, {"best": 0.5}, run_name=None if name == "good" else ".")
    runs = {Path(run.place).name: run for run in tensorboard_reader.read(str(tmp_path))}
    assert sorted(runs) == sorted(LOSSES)
    best = {"best": 0.5, "best (lowest)": 0.5, "best (highest)": 0.5}
    for name, run in runs.items():
        results = dict(run.results)
        assert 0 < results.pop("duration_s") < 60
        assert (run.settings, run.status) == ({} if name == "killed" else hparams, "")
        assert results == {**ENDS[name], **({} if name == "killed" else best)}


@pytest.mark.slow
def test_trials_below_a_run_that_differ_are_runs_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as sweep:
        sweep.add_scalar("trials", 2, 0)
        for lr in (0.1, 0.2):
            sweep.add_hparams({"lr": lr}, {"val_loss": lr}, run_name=f"trial{lr}")
    end = HParamsPluginData(session_end_info=SessionEndInfo(status="STATUS_FAILURE")).SerializeToString()
    kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="hparams", content=end))
    with SummaryWriter(str(tmp_path / "trial0.2")) as failed:
        failed.file_writer.add_summary(
            Summary(value=[Summary.Value(tag="_hparams_/session_end_info", metadata=kind)])
        )
    runs = {Path(run.place).name: run for run in tensorboard_reader.read(str(tmp_path))}
    assert {name: (run.settings, run.status) for name, run in runs.items()} == {
        tmp_path.name: ({}, ""),
        "trial0.1": ({"lr": 0.1}, ""),
        "trial0.2": ({"lr": 0.2}, "failed"),
    }
    assert runs["trial0.2"].results["val_loss"] == pytest.approx(0.2)


def write_events(folder: Path, first: int, losses: list[float], lr: float | None = None) -> Path:
    """An event file of its own in a folder."""
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    from torch.utils.tensorboard.summary import hparams

    before = set(folder.glob("*"))
    writer = EventFileWriter(str(folder))
    if lr is not None:
        writer.add_event(Event(wall_time=time.time(), summary=hparams({"lr": lr}, {})[1]))
    for step, loss in enumerate(losses, start=first):
        value = Summary(value=[Summary.Value(tag="val_loss", simple_value=loss)])
        writer.add_event(Event(wall_time=time.time(), step=step, summary=value))
    writer.close()
    (path,) = set(folder.glob("*")) - before
    return path


def losses_of(run: Run) -> list[Any]:
    return [run.results.get(f"val_loss{end}") for end in ("", " (lowest)", " (highest)")]


def test_files_of_one_folder_that_continue_each_other_are_one_run(tmp_path: Path) -> None:
    write_events(tmp_path, 0, [5.0, 4.0, 0.5], lr=0.1)
    write_events(tmp_path, 2, [2.0, 1.0])
    (run,) = tensorboard_reader.read(str(tmp_path))
    assert (run.place, run.settings, losses_of(run)) == (str(tmp_path), {"lr": 0.1}, [1.0, 1.0, 5.0])


@pytest.mark.parametrize("rates", [(0.1, 0.2), (0.1, 0.1)])
def test_runs_in_one_folder_are_told_apart_by_their_hyperparameters(
    rates: tuple[float, float], tmp_path: Path
) -> None:
    places = [write_events(tmp_path, 0, [2.0, rate], lr=rate) for rate in rates]
    runs = list(tensorboard_reader.read(str(tmp_path)))
    assert sorted(run.place for run in runs) == sorted(map(str, places))
    assert sorted(run.settings["lr"] for run in runs) == [*rates]
    assert all(
        losses_of(run) == [pytest.approx(run.settings["lr"]), pytest.approx(run.settings["lr"]), 2.0]
        for run in runs
    )


@pytest.mark.parametrize("rates", [(None, None), (0.1, None)])
def test_runs_in_one_folder_that_nothing_tells_apart_are_refused(
    rates: tuple[float | None, ...], tmp_path: Path
) -> None:
    for rate in rates:
        write_events(tmp_path, 0, [2.0, 1.0], lr=rate)
    assert refusal(tensorboard_reader, tmp_path) == (
        f"tensorboard:{tmp_path}: expected the event files of one run, got 2 files whose curves begin at the same step or "
        "whose hyperparameters differ, and not each has its own. Move each run's files into a folder of its own."
    )


@pytest.mark.slow
def test_scalars_of_tensorflow_and_files_that_are_cut(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.scalar.summary_v2 import scalar_pb
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "keras")) as writer:
        for step, loss in enumerate([2.0, 1.0]):
            (value,) = scalar_pb("loss", loss).value
            if step:
                value.ClearField("metadata")  # TensorFlow writes it once for each name
            writer.file_writer.add_summary(Summary(value=[value]), step)
    (file,) = (tmp_path / "keras").iterdir()
    (run,) = tensorboard_reader.read(str(tmp_path))
    names = [name for name in run.results if name.startswith("loss")]
    assert [run.results[name] for name in names] == [1.0, 1.0, 2.0]
    file.write_bytes(file.read_bytes()[:-3])
    (cut,) = tensorboard_reader.read(str(tmp_path))
    assert cut.results[names[0]] == 2.0
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "events.out.tfevents.1").write_bytes(b"no events, whatever its name says")
    assert "events.out.tfevents.1: expected an event file: ValueError: a record of " in refusal(
        tensorboard_reader, tmp_path / "empty"
    )
    assert "expected a folder, found none" in refusal(tensorboard_reader, tmp_path / "nowhere")
