"""Stages about results: exact batches, the same run twice, several devices, and a study that is killed and goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
import yaml
from torch import Tensor

from ....objectives.attempts import start_attempt
from ....objectives.examination.examine import examined
from ....objectives.machine.torch_settings import allow_tf32
from ....objectives.training import TrainingRun
from ....search.store.stored import StoredStudy
from ....spaces.errors import BsearchError
from ....spaces.plan import BatchPlan, Sharding
from ....spaces.trial import COUNTED, Measurement, TrialSetup
from ..claims import Claim, Fact, worst
from ..stage import Found, Stage
from .tasks import SMALL_GPT, TINY_GPT, TOKENS, models, setup_of, task_of


def exact(stage: Stage) -> Iterator[Found]:
    """Gradients of one batch in uneven micro-batches against those of the whole; then whole trainings against each other."""
    allow_tf32(False)
    differences = []
    for name, (reference, parameters) in (
        ("small GPT", (TOKENS, SMALL_GPT)),
        (models("cpu")[2][0], models("cpu")[2][1]),
    ):
        whole = _gradients(reference, parameters, BatchPlan(37), stage.device)
        for accumulation in (2, 3, 5):
            parts = _gradients(reference, parameters, BatchPlan(37, accumulation), stage.device)
            size = torch.linalg.vector_norm(whole)
            differences.append(
                (f"{name}, 37 in {accumulation}", float(torch.linalg.vector_norm(parts - whole) / size))
            )
    yield from worst("gradients in uneven micro-batches against one, fp32", 1e-5, differences, unit="")
    setup = setup_of(BatchPlan(1), stage.device, SMALL_GPT)
    examination = examined(TrainingRun(task_of(TOKENS), setup), 1)
    sentence = examination.sentence.removeprefix("examined: ")
    yield Fact("examination of the small GPT", f"{sentence}; {examination.seconds:.1f} s")
    found = 0 if examination.verdict == "exact" else 1
    yield Claim("small GPT not exact in the examination", 0, found, unit="", note=examination.note)
    setup = replace(setup_of(BatchPlan(32), stage.device, SMALL_GPT), samples_budget=512)
    first, second = (train_loss(TOKENS, setup) for _ in range(2))
    yield Fact(
        "training loss of two runs of one seed",
        f"{first:.9g} and {second:.9g}, {abs(second / first - 1):.1g} apart",
    )
    devices = torch.cuda.device_count() if stage.device == "gpu" else 2
    if devices > 1:
        alone = train_loss(TOKENS, replace(setup, plan=BatchPlan(33)))
        what = f"{devices} GPUs" if stage.device == "gpu" else f"{devices} processes"
        for sharding in get_args(Sharding):
            several = replace(setup, plan=BatchPlan(33, devices=devices), sharding=sharding)
            difference = abs(train_loss(TOKENS, several) / alone - 1)
            kind = "uneven shares" if sharding == "ddp" else f"sharded by {sharding}"
            yield Claim(f"training loss on {what} against one, {kind}", 1e-4, difference, unit="")


def study(stage: Stage) -> Iterator[Found]:
    """A study under a memory limit, ended by SIGKILL halfway and started again."""
    with tempfile.TemporaryDirectory(prefix="bsearch-verify-") as name:
        folder = Path(name)
        limit = "256MiB" if stage.device == "gpu" else "8MiB"
        values = {
            "study": "verify",
            "task": TOKENS,
            "space": {
                "effective_batch": {"low": 8, "high": 256},
                "reference_rate": {"low": 1e-4, "high": 1e-2, "at_batch": 32},
                "epochs": 2,
                **(SMALL_GPT if stage.device == "gpu" else TINY_GPT),
            },
            "objectives": {"metric": {"name": "val_loss", "direction": "minimize"}},
            "memory": {"limit": limit},
            "devices": {"kind": stage.device},
            "training": {"evaluations": 2},
            "budget": {"trials": 8, "profile_s": 3},
        }
        path = folder / "study.yaml"
        path.write_text(yaml.safe_dump(values, sort_keys=False))
        before = killed_after(path, stage, finished=3)
        with (folder / "log").open("a") as log:
            done = subprocess.run(command(path, stage), cwd=folder, stdout=log, stderr=log, check=False)
        after = trials_of(path)
        if done.returncode:
            last = ((folder / "log").read_text().strip().splitlines() or [""])[-1]
            raise RuntimeError(f"the study ended with exit code {done.returncode}: {last}")
        lost = [number for number, values in before.items() if after.get(number) != values]
        yield Claim("finished trials lost to SIGKILL", 0, float(len(lost)), unit="", note=f"of {len(before)}")
        counted = sum(outcome in COUNTED for outcome, _ in after.values())
        yield Claim("trials missing after resuming (of 8)", 0, float(8 - counted), unit="")
        failures = sum(trial[0] in ("error", "out_of_memory") for trial in after.values())
        yield Claim(f"trials lost to memory under {limit}", 0, float(failures), unit="")


def _gradients(reference: str, parameters: dict[str, Any], plan: BatchPlan, device: str) -> Tensor:
    """The gradients that one step hands to the optimizer, as one vector in double precision."""
    run = TrainingRun(task_of(reference), replace(setup_of(plan, device, parameters)))
    run.model.eval()  # no dropout: its random numbers depend on the shape
    kept: list[Tensor] = []

    def keep(optimizer: Any, *rest: Any) -> None:
        kept.append(
            torch.cat(
                [
                    parameter.grad.flatten().double().cpu()
                    for parameter in run.parameters
                    if parameter.grad is not None
                ]
            )
        )

    run.optimizer.register_step_pre_hook(keep)
    run.step(run.micro_batches(plan, run.loader([plan])), plan.effective_batch)
    return kept[0]


def train_loss(reference: str, setup: TrialSetup) -> float:
    """The training loss of a whole training."""
    losses = []
    for found in start_attempt(reference, setup):
        if isinstance(found, Measurement):
            losses.append(found.train_loss)
        elif found.kind != "complete":
            raise RuntimeError(found.message or found.kind)
    assert losses[-1] is not None
    return losses[-1]


def command(path: Path, stage: Stage) -> list[str]:
    """That runs a study here."""
    package = __package__.partition(".")[0]
    return [sys.executable, "-m", package, "run", str(path), *(["--serial"] if stage.serial else [])]


def killed_after(path: Path, stage: Stage, finished: int) -> dict[int, tuple[str, Any]]:
    """Start the study and kill it once `finished` trials have ended; what the database then holds of those."""
    with (
        (path.parent / "log").open("a") as log,
        subprocess.Popen(
            command(path, stage), cwd=path.parent, stdout=log, stderr=log, process_group=0
        ) as driver,
    ):
        try:
            while driver.poll() is None and len(trials_of(path)) < finished and not stage.expired:
                time.sleep(0.2)
            if driver.returncode is not None:
                last = ((path.parent / "log").read_text().strip().splitlines() or [""])[-1]
                raise RuntimeError(
                    f"the study ended with exit code {driver.returncode} before it was killed: {last}"
                )
        finally:
            with suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)
    return trials_of(path)


def trials_of(path: Path) -> dict[int, tuple[str, Any]]:
    """Finished trials by number: outcome, and (seconds, metric)."""
    try:
        records = StoredStudy.open(str(path)).records
    except BsearchError:  # the study does not exist yet
        return {}
    ended = [record for record in records if record.has_ended]
    return {record.number: (record.outcome, (record.train_s, record.accuracy)) for record in ended}
