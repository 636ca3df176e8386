"""Trials of Ray Tune: the folder of an experiment, or of several. Only files are read, none of them pickled."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ....spaces.boundary.files import foreign, regular
from ....spaces.errors import StudyFileError
from ..runs import Run, Status, curves_results, flat
from ..values import cell
from .folders import MOST_LOG_BYTES, json_object, runs_below

_STATUS: dict[str, Status] = {"TERMINATED": "finished", "ERROR": "failed", "RUNNING": "running"}
# fmt: off
_BOOKKEEPING = frozenset({
    "checkpoint_dir_name", "config", "date", "done", "episodes_this_iter", "experiment_id", "experiment_tag", "hostname",
    "iterations_since_restore", "node_ip", "pid", "should_checkpoint", "time_since_restore", "time_this_iter_s", "timestamp",
    "timesteps_since_restore", "timesteps_this_iter", "trial_id", "trial_name", "warmup_time",
})
# fmt: on
_COUNTERS = ("training_iteration", "time_total_s", "timesteps_total", "episodes_total")


def read(source: str) -> Iterator[Run]:
    """One run for each folder that holds `params.json`.

    Raises:
        StudyFileError: the folder holds no trial, or a file cannot be read.
    """
    states = dict[str, Status]()

    def run_of(folder: Path, folders: list[str], files: list[str]) -> Run | None:
        with foreign(str(folder), "files of Tune's"):
            if saved := max(
                (name for name in files if re.fullmatch(r"experiment_state-.*\.json", name)), default=""
            ):
                states.clear()
                states.update(_states(folder / saved))  # of its subfolders, which come next
            return _run(folder, set(files), states.get(folder.name, "")) if "params.json" in files else None

    return runs_below(source, run_of, "the folder of a Tune experiment, got none with a params.json")


def _run(folder: Path, files: set[str], status: Status) -> Run:
    settings = dict(flat(json_object(folder / "params.json")))
    results, done = _results(folder)
    if not status:
        status = "failed" if files & {"error.txt", "error.pkl"} else "finished" if done else ""
    return Run(str(folder), settings, results, status=status)


def _states(path: Path) -> dict[str, Status]:
    """Status by the trial's folder, of Tune's own table of trials."""
    states: dict[str, Status] = {}
    for entry in json_object(path).get("trial_data", ()):
        trial = (
            json_object(path, entry[0])
            if isinstance(entry, list) and entry and isinstance(entry[0], str)
            else {}
        )
        states[str(trial.get("relative_logdir"))] = _STATUS.get(str(trial.get("status")), "")
    return states


def _results(folder: Path) -> tuple[dict[str, float], bool]:
    """The ends of the metrics' curves, and whether the last report says that it is the last."""
    curves, done = defaultdict[str, list[float]](list), False
    for record in _reports(folder):
        done = record.get("done") is True
        metrics = {
            name: value for name, value in record.items() if name.partition("/")[0] not in _BOOKKEEPING
        }
        for name, value in flat(metrics):
            if isinstance(value, int | float) and not isinstance(value, bool):
                curves[name].append(value)
    counters = {name: curves.pop(name)[-1] for name in _COUNTERS if name in curves}
    return counters | curves_results(curves), done


def _reports(folder: Path) -> Iterator[dict[str, Any]]:
    """What a trial reported, in `result.json` or else in `progress.csv`; the last line may be cut off."""
    path = folder / "result.json"
    if path.exists() and path.stat().st_size:
        with regular(path, "a trial's reports", MOST_LOG_BYTES).open(
            encoding="utf-8", errors="replace"
        ) as file:
            for line, text in enumerate(file, start=1):
                try:
                    report = json_object(path, text.rstrip(), line)  # else its end counts as a line
                except StudyFileError:
                    if text.endswith("\n"):
                        raise
                else:
                    yield report
    elif (path := folder / "progress.csv").is_file():
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            for row in csv.DictReader(line for line in file if line.endswith("\n")):
                yield {name: cell(text) for name, text in row.items() if isinstance(text, str)}
