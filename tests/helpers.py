"""What several tests share: a setup, a small exact task, a study run in this process, a database read beside its driver."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import torch
from bsearch.objectives.task import Data, Loss, Task
from bsearch.objectives.task_code import task_code_hash
from bsearch.search.report.optuna_view import copy_now
from bsearch.search.report.stdio.answer import MOST, schemas
from bsearch.search.run.driver import run_study
from bsearch.search.run.serial import SerialRunner
from bsearch.search.store.stored import StoredStudy
from bsearch.search.suggest.optuna.database import open_storage
from bsearch.spaces.learning_rate import OptimizerSettings
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.study.file import read_study
from bsearch.spaces.study.training import Training
from bsearch.spaces.trial import TrialSetup
from click.testing import CliRunner, Result
from jsonschema import Draft202012Validator
from torch import nn
from torch.utils.data import TensorDataset


def setup(
    batch: int = 32, accumulation: int = 1, budget: int = 400, rate: float = 0.1, **changes: Any
) -> TrialSetup:
    training = Training.model_validate({"evaluations": 2, **changes.pop("training", {})})
    made = TrialSetup(
        study="law",
        number=0,
        attempt=0,
        plan=BatchPlan(batch, accumulation),
        optimizer=OptimizerSettings(rate),
        samples_budget=budget,
        training=training,
        epochs=1,
    )
    return replace(made, **changes)


def on(devices: int, batch: int, accumulation: int = 1, **changes: Any) -> dict[str, Any]:
    return setup(batch, **({"plan": BatchPlan(batch, accumulation, devices)} | changes)).to_dict()


class Net(Task):
    """A small net in double precision; its loss may weigh classes, ignore labels, or count tokens."""

    kind = "samples"

    def data(self, setup: TrialSetup) -> Data:
        generator = torch.Generator().manual_seed(3)
        inputs = torch.randn(600, 6, generator=generator, dtype=self.dtype)
        labels = torch.randint(0, 5, (600, 4) if self.kind == "tokens" else (600,), generator=generator)
        ignored = torch.rand(labels.shape, generator=generator) < 0.3
        if self.kind in ("ignored", "tokens"):
            labels[ignored] = -100
        data = TensorDataset(inputs, labels)
        return Data(data, data)

    dtype = torch.float64

    def model(self, setup: TrialSetup) -> nn.Module:
        outputs = 20 if self.kind == "tokens" else 5
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, outputs)).to(self.dtype)

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        inputs, labels = batch
        logits = model(inputs)
        if self.kind == "tokens":
            logits = logits.view(-1, 5, 4)
        weights = (
            torch.tensor([0.2, 1.0, 3.0, 0.5, 2.0], dtype=self.dtype) if self.kind == "weights" else None
        )
        total = nn.functional.cross_entropy(logits, labels, weight=weights, reduction="sum")
        if weights is not None:
            return Loss(total, weights[labels].sum())
        return Loss(total, (labels != -100).sum() if self.kind in ("ignored", "tokens") else len(labels))


def run(path: Path, **options: object):  # type: ignore[no-untyped-def]
    spec = read_study(path)
    return run_study(spec, SerialRunner(spec.devices), task_code_hash(spec.task), **options)  # type: ignore[arg-type]


def bsearch(*arguments: object) -> Result:
    from bsearch.cli import main

    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def as_optuna(url: str | Path, name: str = "small") -> optuna.Study:
    """A study's copy for Optuna, up to date.

    Args:
        url: of the database, or the path of an SQLite file.
    """
    url = f"sqlite:///{url}" if isinstance(url, Path) else url
    copy_now(StoredStudy.open(url, name)).close()
    return optuna.load_study(study_name=name, storage=open_storage(url))


SPACE = {"effective_batch": {"low": 40, "high": 80}, "reference_rate": {"low": 0.1, "high": 0.2}, "epochs": 1}


def finished(path: Path) -> dict[int, tuple[float, ...]]:
    """Complete trials and their values, read by plain SQL beside the running driver."""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection, connection:
            rows = connection.execute(
                "SELECT number, objectives FROM bsearch_trial WHERE objectives IS NOT NULL"
            ).fetchall()
    except sqlite3.OperationalError:
        return {}
    return {number: tuple(json.loads(values)) for number, values in rows}


# Answers that are asked for as a whole.
_LONG = {"trials", "profile"}


def validated(line: str) -> dict[str, Any]:
    """An answer that its schema allows, and that is short."""
    document: dict[str, Any] = json.loads(line)
    schema = {**schemas()["$defs"][document["answer"]], "$defs": schemas()["$defs"]}
    Draft202012Validator(schema).validate(document)
    assert document["answer"] in _LONG or len(line) <= 1.1 * MOST
    return document
