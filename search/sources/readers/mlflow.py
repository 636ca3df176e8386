"""Runs of an MLflow experiment, named as `EXPERIMENT` or `URI#EXPERIMENT`."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import warnings
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from ....spaces.boundary.files import regular
from ....spaces.boundary.storage import sqlite_parts, sqlite_url
from ....spaces.errors import StudyFileError, cut, near_miss
from ..runs import Run, Scalar, Status, curve_results
from ..values import cell, spent
from .folders import MOST_LOG_BYTES

_STATUS: dict[str, Status] = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "failed"}
_MOST_WITH_CURVES = 200  # runs: each curve is a request of its own
_PAGE_RUNS = 1000
# Old stores of files are only read here, and a server that is down is told after seconds.
_USUAL = {
    "ALLOW_FILE_STORE": "true",
    "DISABLE_TELEMETRY": "true",
    "HTTP_REQUEST_MAX_RETRIES": "2",
    "HTTP_REQUEST_TIMEOUT": "10",
}


def read(source: str) -> Iterator[Run]:
    """The runs of `EXPERIMENT` in the store that MLFLOW_TRACKING_URI names, or of `URI#EXPERIMENT`."""
    uri, experiment = source.split("#", 1) if "#" in source else ("", source)
    for name, value in _USUAL.items():
        os.environ.setdefault(f"MLFLOW_{name}", value)
    try:
        mlflow = import_module("mlflow")
    except ImportError:
        raise _fault(
            source, "the package mlflow to read it, found none. Install it: pip install mlflow"
        ) from None
    for noisy in ("mlflow", "alembic"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            runs = _runs(mlflow, source, uri, experiment)
    except StudyFileError:
        raise
    except Exception as error:  # MLflow raises its own errors, its database's and its transport's
        # The URI stands before it already; of two, masking a password would hide all that is between them.
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        got = cut(first.replace(uri, "...") if "@" in uri else first, 500).rstrip(".")
        raise _fault(
            source, f"an experiment that MLflow can read, got {got}. Check the tracking URI."
        ) from None
    yield from runs


def _fault(source: str, expected: str) -> StudyFileError:
    return StudyFileError(f"mlflow:{source}: expected {expected}")


def _runs(mlflow: Any, source: str, uri: str, experiment: str) -> list[Run]:
    uri = uri or mlflow.get_tracking_uri()
    uri = sqlite_url(uri) if Path(uri).is_file() else uri
    _check_store(source, uri)
    client = mlflow.MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        known = [each.name for each in client.search_experiments()]
        raise _fault(
            source,
            f"an experiment of {', '.join(known[:20])}; got {experiment!r}.{near_miss(experiment, known)}",
        )
    page = client.search_runs([found.experiment_id], max_results=_PAGE_RUNS)
    runs = list(page)
    while page.token:
        page = client.search_runs([found.experiment_id], max_results=_PAGE_RUNS, page_token=page.token)
        runs += page
    if not runs:
        raise _fault(source, f"runs in the experiment {experiment!r}, found none.")
    parents = {run.data.tags.get("mlflow.parentRunId") for run in runs}
    read = [(run, _run(run, client if len(runs) <= _MOST_WITH_CURVES else None)) for run in runs]
    # A parent has its best child's values, and the seconds of them all.
    return [
        replace(one, no_run="the parent of other runs") if run.info.run_id in parents else one
        for run, one in read
    ]


def _check_store(source: str, uri: str) -> None:
    """A local store has to exist: else MLflow would create it, or its tables in another program's database."""
    database = sqlite_parts(uri)
    if database is None:
        known = "://" in uri.removeprefix("file://") or uri == "databricks"
        folder = Path(uri.removeprefix("file://").removeprefix("file:"))
        known = known or folder.is_dir()
        for path in folder.rglob("*") if folder.is_dir() else ():
            if not path.is_dir():
                regular(path, "a file of MLflow's", MOST_LOG_BYTES)
    elif known := Path(database[0]).is_file():
        with contextlib.closing(
            sqlite3.connect(f"{Path(database[0]).absolute().as_uri()}?mode=ro", uri=True)
        ) as connection:
            known = bool(
                connection.execute("select 1 from sqlite_master where name = 'experiments'").fetchone()
            )
    if not known:
        raise _fault(
            source,
            f"MLflow's runs in {uri}, found no such store. Write URI#EXPERIMENT, or set MLFLOW_TRACKING_URI.",
        )


def _run(run: Any, client: Any) -> Run:
    """A run with the lowest and highest values of its metrics where there is a client to ask for their curves."""
    info, results, moments, told = run.info, dict[str, Scalar](), set[float](), ""
    for name, last in run.data.metrics.items():
        # System metrics are many, and nobody seeks the extremes of a disk's usage.
        history = (
            client.get_metric_history(info.run_id, name) if client and not name.startswith("system/") else ()
        )
        curve = sorted(history, key=lambda metric: (metric.step, metric.timestamp))
        results |= curve_results(name, (metric.value for metric in curve)) | {name: last}
        moments |= {metric.timestamp / 1000 for metric in curve}
    if info.start_time is not None and info.end_time is not None:
        begun, ended = info.start_time / 1000, info.end_time / 1000
        inside = sorted(moment for moment in moments if begun <= moment <= ended)
        results["duration_s"], told = spent([begun, *inside, ended])
    name = run.data.tags.get("mlflow.runName", "")
    settings = {name: value for name, text in run.data.params.items() if (value := cell(text)) is not None}
    return Run(
        f"{name} ({info.run_id})".strip(),
        settings,
        results,
        status=_STATUS.get(info.status, "running"),
        told=told,
    )
