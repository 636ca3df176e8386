"""What each tracker receives of a trial. A tracker knows what it has, so that sending again creates no duplicates.

Their own environment variables say where they write (MLFLOW_TRACKING_URI, WANDB_MODE, WANDB_PROJECT, ...); the default is the
study's folder of results.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from ...search.store.rows import MeasurementRow
from ...search.store.url import shown_url
from ...spaces.boundary.storage import sqlite_url
from ...spaces.errors import StudyFileError
from ...spaces.readable import from_here
from ...spaces.record import TrialRecord

# Settings of a training that trackers show beside the searched parameters.
_SETTINGS = (
    *(
        "effective_batch",
        "micro_batch",
        "accumulation",
        "devices",
        "activation_checkpointing",
        "rule",
        "learning_rate",
    ),
    *("weight_decay", "betas", "eps", "epochs", "samples_budget", "seed", "optimizer"),
)
_RESULTS = (
    "train_s",
    "device_s",
    "spent",
    "measured_train_s",
    "samples_per_s",
    "peak_bytes",
    "peak_reserved_bytes",
)


@dataclass(frozen=True, slots=True)
class TrackedTrial:
    """A trial as trackers see it.

    Args:
        metric: name of the study's metric.
        curve: its measurements in order.
        on_front: at this moment.
    """

    record: TrialRecord
    metric: str
    curve: tuple[MeasurementRow, ...]
    on_front: bool

    @property
    def ended(self) -> bool:
        return self.record.has_ended

    @property
    def parameters(self) -> dict[str, Any]:
        """Searched parameters and settings by name; lists as text."""
        settings = self.record.settings
        chosen = {name: settings[name] for name in _SETTINGS if settings.get(name) is not None}
        # As trained: the rule and the plan have replaced what was suggested.
        chosen = {
            **self.record.parameters,
            **chosen,
        }
        return {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in chosen.items()
        }

    @property
    def results(self) -> dict[str, float]:
        """What it reached, numbers by name."""
        facts = self.record.facts.to_dict()
        found = {name: facts.get(name) for name in _RESULTS} | {"cost": self.record.taken("cost")}
        if self.record.accuracy is not None:
            found[self.metric] = self.record.accuracy
        return {
            name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)
        }

    def points(self, after: int = 0) -> Iterator[tuple[int, dict[str, float]]]:
        """Samples seen and numbers by name, of each measurement after a number of samples."""
        for row in self.curve:
            if row.samples_seen > after:
                values = {
                    "train_loss": row.train_loss,
                    "elapsed_s": row.elapsed_s,
                    self.metric: row.accuracy,
                    **row.scores,
                }
                yield (
                    row.samples_seen,
                    {name: float(value) for name, value in values.items() if value is not None},
                )
                after = row.samples_seen


class Tracker(Protocol):
    """One tracker of one study.

    Attributes:
        where: the place that its runs go to, for people.
    """

    where: str

    def knows(self, number: int, on_front: bool) -> bool:
        """Whether it has all of a trial that has ended."""

    def tell(self, trial: TrackedTrial) -> None:
        """Write what is new of a trial. If it raises, whatever the error, the trial is sent again later."""


class MLflow:
    """A run for each trial, in an experiment of the study's name; curves grow as trials train."""

    def __init__(self, study: str, identity: str, folder: Path) -> None:
        # A server that is down is tried again later: seconds of retries are enough.
        usual = {
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
            "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
        }
        for name, value in usual.items():
            os.environ.setdefault(name, value)
        mlflow = _imported("mlflow")
        for noisy in ("mlflow", "alembic"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        address = os.environ.get("MLFLOW_TRACKING_URI")
        self.where = shown_url(address) if address else str(from_here(folder / "mlflow.db"))
        if not address:
            folder.mkdir(parents=True, exist_ok=True)
        self._client = mlflow.MlflowClient(address or sqlite_url(folder / "mlflow.db"))
        self._study, self._identity, self._experiment = study, identity, ""
        # By number: run, samples sent, outcome, and whether it was on the front.
        self._runs: dict[int, tuple[str, int, str, bool]] = {}

    def _open(self) -> None:
        """Find the experiment and what it has, or create it."""
        experiment = self._client.get_experiment_by_name(self._study)
        self._experiment = (
            experiment.experiment_id if experiment else self._client.create_experiment(self._study)
        )
        page = None
        while True:
            found = self._client.search_runs([self._experiment], page_token=page)
            for run in found:
                tags = run.data.tags
                if tags.get("bsearch.study") == self._identity:
                    told, front = int(tags.get("bsearch.samples", 0)), tags.get("bsearch.front") == "true"
                    self._runs[int(tags["bsearch.trial"])] = (
                        run.info.run_id,
                        told,
                        tags.get("bsearch.outcome", ""),
                        front,
                    )
            page = found.token
            if not page:
                return

    def knows(self, number: int, on_front: bool) -> bool:
        if not self._experiment:
            self._open()
        known = self._runs.get(number)
        return known is not None and bool(known[2]) and known[3] == on_front

    def tell(self, trial: TrackedTrial) -> None:
        from mlflow.entities import Metric, Param, RunTag

        if not self._experiment:
            self._open()
        record, number = trial.record, trial.record.number
        if number not in self._runs:
            tags = {
                "bsearch.study": self._identity,
                "bsearch.trial": str(number),
                "mlflow.runName": f"trial {number}",
            }
            run = self._client.create_run(self._experiment, start_time=_ms(record.started_at), tags=tags)
            self._runs[number] = run.info.run_id, 0, "", False
        identity, told, outcome, _ = self._runs[number]
        start, metrics = _ms(record.started_at) or 0, []
        for samples, values in trial.points(told):
            at = start + round(1000 * values.get("elapsed_s", 0.0))
            metrics += [
                Metric(_allowed(name), value, at, samples)
                for name, value in values.items()
                if math.isfinite(value)
            ]
            told = samples
        tags = {"bsearch.samples": str(told), "bsearch.front": str(trial.on_front).lower()}
        params: list[Any] = []
        if trial.ended and not outcome:
            params = [Param(_allowed(name), str(value)[:500]) for name, value in trial.parameters.items()]
            results = {
                name: value
                for name, value in trial.results.items()
                if name != trial.metric or not trial.curve
            }
            metrics += [
                Metric(_allowed(name), value, _ms(record.ended_at) or 0, told)
                for name, value in results.items()
            ]
            tags |= {"bsearch.message": record.message[:500]} if record.message else {}
        for begin in range(0, max(len(metrics), 1), 900):
            last = begin + 900 >= len(metrics)
            self._client.log_batch(
                identity,
                metrics[begin : begin + 900],
                params[:100] if last else [],
                [RunTag(*tag) for tag in tags.items()] if last else [],
            )
        if trial.ended and not outcome:
            outcome = record.outcome
            status = (
                "FINISHED"
                if record.counts
                else "KILLED"
                if outcome in ("interrupted", "paused")
                else "FAILED"
            )
            self._client.set_terminated(identity, status, _ms(record.ended_at))
            self._client.set_tag(identity, "bsearch.outcome", outcome)  # last: it marks the run as complete
        self._runs[number] = identity, told, outcome, trial.on_front


class TensorBoard:
    """A folder of events for each trial; hyperparameters and results are written when it ends."""

    def __init__(self, study: str, identity: str, folder: Path) -> None:
        _imported("tensorboard")
        self._identity = identity
        self.folder = folder / "tensorboard"
        self.where = str(from_here(self.folder))
        self._told: dict[int, int] = {}

    def _of(self, number: int) -> Path:
        return self.folder / f"trial-{number:04}"

    def knows(self, number: int, on_front: bool) -> bool:
        mark = self._of(number) / "ended"
        return mark.exists() and mark.read_text() == self._identity

    def tell(self, trial: TrackedTrial) -> None:
        from torch.utils.tensorboard import SummaryWriter

        number = trial.record.number
        if number not in self._told:  # what another process began is written again
            shutil.rmtree(self._of(number), ignore_errors=True)
        with SummaryWriter(str(self._of(number))) as writer:
            for samples, values in trial.points(self._told.get(number, 0)):
                for name, value in values.items():
                    writer.add_scalar(name, value, samples)
                self._told[number] = samples
            self._told.setdefault(number, 0)
            if trial.ended:
                results = {f"result/{name}": value for name, value in trial.results.items()}
                writer.add_hparams(trial.parameters, results, run_name=".")
        if trial.ended:
            (self._of(number) / "ended").write_text(self._identity)


class WandB:
    """A run for each trial that has ended: one project for each study; offline without a key."""

    def __init__(self, study: str, identity: str, folder: Path) -> None:
        self._wandb = _imported("wandb")
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        offline = (
            os.environ.get("WANDB_MODE", "online" if self._wandb.login(prompt=False) else "offline")
            != "online"
        )
        self._mode, self._project = "offline" if offline else "online", os.environ.get("WANDB_PROJECT", study)
        self.where = f"project {self._project}"
        if offline:
            self.where = f"{from_here(folder / 'wandb')} (offline; `wandb sync` uploads it)"
        self._identity = identity

    def knows(self, number: int, on_front: bool) -> bool:
        identity = f"{self._identity}-{number}"
        if self._mode == "offline":
            return any((self.folder / "wandb").glob(f"offline-run-*-{identity}/ended"))
        try:
            # Those that failed were written at once too; a crashed one was cut off.
            return self._wandb.Api().run(f"{self._project}/{identity}").state in ("finished", "failed")
        except (ValueError, self._wandb.errors.CommError):
            return False  # there is no such run

    def tell(self, trial: TrackedTrial) -> None:
        if not trial.ended:
            return
        run = self._wandb.init(
            project=self._project,
            id=f"{self._identity}-{trial.record.number}",
            name=f"trial {trial.record.number}",
            dir=str(self.folder),
            config=trial.parameters,
            mode=self._mode,
            resume="allow" if self._mode == "online" else None,
            settings=self._wandb.Settings(silent=True, x_disable_stats=True, disable_git=True, console="off"),
        )
        for samples, values in trial.points():
            run.log(values, step=samples)
        run.summary.update({**trial.results, "outcome": trial.record.outcome})
        place = Path(run.dir).parent
        run.finish(exit_code=0 if trial.record.counts else 1)
        if self._mode == "offline":
            (place / "ended").write_text(trial.record.outcome)


def _imported(package: str) -> Any:
    try:
        return __import__(package)
    except ImportError:
        advice = f"Run pip install {package}, or choose another tracker."
        raise StudyFileError(f"tracking: {package} is not installed. {advice}") from None


def _allowed(name: str) -> str:
    """A name as MLflow takes it.

    >>> _allowed("recall@5")
    'recall_5'
    """
    return re.sub(r"[^\w\-. /]", "_", name)


def _ms(text: str) -> int | None:
    return round(1000 * datetime.fromisoformat(text).timestamp()) if text else None
