"""Old runs as libraries write them themselves, from the source to three trials: `ask`, `init --from`, `run`."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from helpers import validated

pytestmark = [pytest.mark.long, pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]
Setting = tuple[int, float, float, float]


def settings(number: int = 14) -> list[Setting]:
    """Batch, rate, seconds and accuracy of runs of a law."""
    rng, made = np.random.default_rng(3), list[Setting]()
    for _ in range(number):
        batch, rate = int(rng.integers(8, 400)), float(f"{0.1 * math.exp(rng.normal(0, 0.6)):.3g}")
        made.append(
            (batch, rate, round(60 + 4000 / batch, 2), round(0.95 - 0.02 * math.log(rate / 0.1) ** 2, 4))
        )
    return made


def of_optuna(folder: Path) -> str:
    """A journal with two objectives, and the passes as an attribute."""
    import optuna

    path = folder / "journal.log"
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    study = optuna.create_study(storage=storage, directions=["minimize", "maximize"], study_name="old")
    study.set_metric_names(["seconds", "accuracy"])
    for batch, rate, seconds, accuracy in settings():
        study.enqueue_trial({"micro_batch": max(1, batch // 2), "lr": rate})
        trial = study.ask()
        trial.suggest_int("micro_batch", 1, 999)
        trial.suggest_float("lr", 1e-6, 10, log=True)
        trial.set_user_attr("accumulation", 2)
        study.tell(trial, [seconds, accuracy])
    return f"optuna:{path}"


def of_mlflow(folder: Path) -> str:
    """A parent with its children, one of which slept."""
    import mlflow

    uri = f"sqlite:///{folder / 'mlflow.db'}"
    client = mlflow.MlflowClient(uri)
    experiment = client.create_experiment("old", artifact_location=str(folder / "artifacts"))
    at = int(1000 * time.time()) - 10**9
    parent = client.create_run(experiment, start_time=at)
    for place, (batch, rate, seconds, accuracy) in enumerate(settings()):
        run = client.create_run(
            experiment, start_time=at, tags={"mlflow.parentRunId": parent.info.run_id}
        ).info.run_id
        client.log_param(run, "config/batch_size", batch)
        client.log_param(run, "config/lr", rate)
        now = at
        for step in range(10):
            now += round(100 * seconds) + (30_000_000 if place == 3 and step == 5 else 0)
            client.log_metric(run, "val_accuracy", accuracy * (step + 1) / 10, now, step)
        client.set_terminated(run, end_time=now)
    client.set_terminated(parent.info.run_id, end_time=at + 10**8)
    return f"mlflow:{uri}#old"


def of_tensorboard(folder: Path) -> str:
    """Hyperparameters below each run, as `add_hparams` writes them, and one run in two files."""
    from torch.utils.tensorboard import SummaryWriter

    for place, (batch, rate, seconds, accuracy) in enumerate(settings()):
        at = time.time()
        for steps in ((1, 2, 3, 4, 5), (6, 7, 8, 9, 10)) if place == 2 else (range(1, 11),):
            writer = SummaryWriter(str(folder / f"run{place}"), filename_suffix=f".{steps[0]}")  # type: ignore[no-untyped-call]
            for step in steps:
                at += seconds / 10
                writer.add_scalar("val/accuracy", accuracy * step / 10, step, walltime=at)  # type: ignore[no-untyped-call]
            if steps[-1] == 10:
                writer.add_hparams({"batch_size": batch, "lr": rate}, {"end": 0.0}, run_name="hparams")  # type: ignore[no-untyped-call]
            writer.close()  # type: ignore[no-untyped-call]
    return f"tensorboard:{folder}"


def of_lightning(folder: Path) -> str:
    """Lightning's own loop with its CSV logger, tested after each training."""
    import lightning
    import torch
    from lightning.pytorch.loggers import CSVLogger

    class Module(lightning.LightningModule):
        def __init__(self, batch_size: int, lr: float, accuracy: float) -> None:
            super().__init__()
            self.save_hyperparameters(ignore=["accuracy"])
            self.layer, self.accuracy = torch.nn.Linear(2, 1), accuracy

        def training_step(self, batch: Any, place: int) -> torch.Tensor:
            return self.layer(batch[0]).square().mean()

        def validation_step(self, batch: Any, place: int) -> None:
            self.log("val_acc", self.accuracy)

        def test_step(self, batch: Any, place: int) -> None:
            self.log("test_acc", self.accuracy - 0.5)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), self.hparams["lr"])

    data = torch.utils.data.TensorDataset(torch.randn(640, 2))
    for batch, rate, _, accuracy in settings():
        loader = torch.utils.data.DataLoader(data, batch)
        trainer = lightning.Trainer(
            max_epochs=2, logger=CSVLogger(str(folder)), enable_progress_bar=False, enable_checkpointing=False,
            accelerator="cpu",
        )  # fmt: skip
        module = Module(batch, rate, accuracy)
        trainer.fit(module, loader, loader)
        trainer.test(module, loader, verbose=False)
    return str(folder)


def of_trainer(folder: Path) -> str:
    """Hugging Face's own loop."""
    import torch
    from transformers import Trainer, TrainingArguments

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layer(x).square().mean()}

    data = [{"x": torch.randn(2)} for _ in range(64)]
    for place, (batch, rate, _, accuracy) in enumerate(settings()):
        arguments = TrainingArguments(
            str(folder / f"run{place}"), per_device_train_batch_size=max(1, batch // 2), gradient_accumulation_steps=2,
            learning_rate=rate, num_train_epochs=2, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(Net(), arguments, train_dataset=data)
        trainer.train()
        trainer.log({"eval_accuracy": accuracy})
        trainer.save_state()
        torch.save(arguments, folder / f"run{place}" / "training_args.bin")
    return str(folder)


SOURCES: dict[str, tuple[Callable[[Path], str], list[str], list[int]]] = {
    "optuna": (of_optuna, ["--metric", "accuracy"], [max(1, batch // 2) * 2 for batch, *_ in settings()]),
    "mlflow": (of_mlflow, ["--metric", "val_accuracy"], [batch for batch, *_ in settings()]),
    "tensorboard": (of_tensorboard, ["--metric", "val/accuracy"], [batch for batch, *_ in settings()]),
    "lightning": (of_lightning, ["--metric", "val_acc"], [batch for batch, *_ in settings()]),
    "trainer": (
        of_trainer,
        ["--metric", "eval_accuracy"],
        [max(1, batch // 2) * 2 for batch, *_ in settings()],
    ),
}


TASK = """
from bsearch.objectives.digits import Digits

class MyTask(Digits):
    def score(self, model, batch, setup):
        return {{{metric!r}: super().score(model, batch, setup)["accuracy"]}}
"""


@pytest.mark.parametrize("name", SOURCES)
def test_from_old_runs_to_three_trials(name: str, tmp_path: Path) -> None:
    made, options, batches = SOURCES[name]
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    source = made(old)
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}

    def bsearch(*words: str) -> str:
        command = [sys.executable, "-m", "bsearch", *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    print(bsearch("ask", source, *options))
    assert validated(bsearch("ask", source, *options, "--json"))["columns"]
    print(bsearch("init", str(new), "--from", source, *options))
    rows = [yaml.safe_load(line) for line in (new / "old-runs.jsonl").read_text().splitlines()]
    assert sorted(row["config"]["effective_batch"] for row in rows) == sorted(batches)
    study = yaml.safe_load((new / "study.yaml").read_text())
    (new / "tasks.py").write_text(TASK.format(metric=study["objectives"]["metric"]["name"]))
    study["budget"] = {"trials": 3}
    (new / "study.yaml").write_text(yaml.safe_dump(study))
    print(bsearch("run", str(new / "study.yaml"), "--serial"))
