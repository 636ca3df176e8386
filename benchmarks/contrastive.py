"""Losses that compare the samples of a batch, split by gradient caching: gradients, memory, times, and studies.

    python benchmarks/contrastive.py FOLDER gradients|costs|study

FOLDER has the images of CIFAR-10 as train/<class>/ and test/<class>/; the tasks are those of examples/contrastive, under a
memory limit that forbids the whole batch. `study` compares a study with the same one split as a sum over samples.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from bsearch import Study
from bsearch import run as run_study
from bsearch.objectives.loading import load_task
from bsearch.objectives.parallel.rank_processes import over_ranks
from bsearch.objectives.profiling.held import Held
from bsearch.objectives.profiling.memory.live_bytes import LiveBytes
from bsearch.objectives.profiling.task_profile import profile_task
from bsearch.objectives.training import TrainingRun
from bsearch.spaces.laws.device import ProfileRequest
from bsearch.spaces.learning_rate import OptimizerSettings
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.planning import planned
from bsearch.spaces.study.devices import Memory
from bsearch.spaces.study.spec import StudySpec
from bsearch.spaces.study.training import Training
from bsearch.spaces.trial import TrialSetup
from torch import Tensor

HERE = Path(__file__).resolve()
TASKS = HERE.parent.parent / "examples" / "contrastive" / "tasks.py"
BATCH, MICRO_BATCHES = 257, 5
WIDTH, SIZE, SAMPLES = 16, 16, 4000
_PARAMETERS = {"image_size": SIZE, "train_samples": SAMPLES, "evaluation_samples": 1000, "width": WIDTH}
LIMIT = "40MiB"


def setup_of(folder: str, plan: BatchPlan, **changes: Any) -> TrialSetup:
    made = TrialSetup(
        study="contrastive",
        number=0,
        attempt=0,
        plan=plan,
        optimizer=OptimizerSettings(0.05),
        samples_budget=SAMPLES,
        training=Training(),
        epochs=1,
        parameters={**_PARAMETERS, "root": folder},
    )
    return replace(made, **changes)


def gradient(reference: str, setup: dict[str, Any]) -> Iterator[list[Tensor]]:
    """The first step's gradient in double precision, which ranks compute too."""
    task: Any = load_task(reference)
    kept = task.model
    task.model = lambda one: kept(one).double()
    # Images are of bytes: the view is made in single precision, and is the same in any split.
    module: Any = sys.modules[type(task).__module__]
    shown = module.view
    module.view = lambda pixels, draws: shown(pixels, draws).double()
    try:
        run = TrainingRun(task, TrialSetup.from_dict(setup))
        run.modes.train(run.model)
        plan = run.setup.plan
        run.accumulate(run.micro_batches(plan, run.loader([plan])), plan.effective_batch)
    finally:
        module.view = shown
    yield [parameter.grad.clone() for parameter in run.parameters if parameter.grad is not None]


def gradients(folder: str) -> None:
    """The gradient of 257 samples: unsplit, in 5 micro-batches, and on two devices."""
    print(f"{'task':8} {'plan':32} relative difference from the one batch")
    for name in ("SimCLR", "CLIP"):
        reference = f"{TASKS}:{name}"
        (whole,) = gradient(reference, setup_of(folder, BatchPlan(BATCH)).to_dict())
        scale = float(torch.cat([one.flatten() for one in whole]).norm())
        for devices in (1, 2):
            for accumulation in (1, MICRO_BATCHES) if devices == 2 else (MICRO_BATCHES,):
                plan = BatchPlan(BATCH, accumulation, devices)
                values = setup_of(folder, plan).to_dict()
                if devices == 1:
                    (split,) = gradient(reference, values)
                else:
                    (split,) = over_ranks(2, "cpu", 1, gradient, reference, values)
                off = (
                    float(torch.cat([(a - b).flatten() for a, b in zip(split, whole, strict=True)]).norm())
                    / scale
                )
                shares = " | ".join(
                    " + ".join(map(str, plan.micro_batches(device))) for device in range(devices)
                )
                print(f"{name:8} {shares:32} {off:.1e}")


def costs(folder: str) -> None:
    """Predicted against measured memory and step time of batches that no plan of the profile's was timed with."""
    spec = StudySpec.model_validate(study_of("SimCLR", folder, folder))
    setup = setup_of(folder, BatchPlan(32))
    for name in ("SimCLR", "CLIP"):
        reference = f"{TASKS}:{name}"
        memory = Memory.model_validate({"limit": LIMIT})
        profile = profile_task(reference, ProfileRequest(setup, memory, 512, timing_s=20.0))
        print(
            f"{'batch':>5} {'plan':>10} {'MiB known':>11} {'measured':>9} {'off':>6} {'ms law':>10} {'measured':>9} {'off':>6}"
        )
        rounds: dict[int, list[float]] = {}
        most = max(one.largest_batch or one.largest_micro_batch or 0 for one in profile.each)
        print(
            f"{name}: largest micro-batch unsplit and cached: {[one.largest_micro_batch for one in profile.each]}; batch {most}"
        )
        plans = {
            batch: planned(spec, profile, batch, 1)
            for batch in (101, 150, 257, 311, 400, 512)
            if batch <= most
        }
        for _ in range(5):
            for batch, plan in plans.items():
                rounds.setdefault(batch, []).append(step_s(reference, replace(setup, plan=plan)))
        for batch, plan in plans.items():
            used = profile.under(plan)
            assert used.memory is not None
            peak = used.memory.peak_bytes(plan.largest_micro_batch) + used.memory.held_bytes * batch
            measured = measured_peak(reference, replace(setup, plan=plan))
            law = used.step_time(1)
            assert law is not None
            known, took = law.step_s(plan), median(rounds[batch])
            mib, ms = 2**20, 1e-3
            print(
                f"{batch:5} {plan.largest_micro_batch:>5} x {plan.accumulation:<2} {peak / mib:11.1f} {measured / mib:9.1f} "
                f"{peak / measured - 1:+6.1%} {known / ms:10.1f} {took / ms:9.1f} {known / took - 1:+6.1%}"
            )


def step_s(reference: str, setup: TrialSetup) -> float:
    took = []
    with closing(Held(load_task(reference), setup)) as held:
        loader = held.engine.loader([setup.plan] * 5)
        for _ in range(5):
            started = time.perf_counter()
            held.step(held.engine.micro_batches(setup.plan, loader), setup.plan.effective_batch)
            took.append(time.perf_counter() - started)
    return median(took[1:])


def measured_peak(reference: str, setup: TrialSetup) -> int:
    """Live bytes of two real steps, counted."""
    peaks = []
    with closing(Held(load_task(reference), setup)) as held:
        engine, loader = held.engine, held.engine.loader([setup.plan] * 2)
        for _ in range(2):
            counter = LiveBytes()
            counting = counter.counting(engine.model, engine.optimizer, engine.averages)
            held.step(engine.micro_batches(setup.plan, loader), setup.plan.effective_batch, [counting])
            peaks.append(counter.peak_bytes)
    return max(peaks)


NAIVE = """class Naive(CLIP):
    embed = Vision.embed
    batch_loss = Vision.batch_loss

    def loss(self, model, batch, setup):
        mean = CLIP.batch_loss(self, model, CLIP.embed(self, model, batch, setup), setup)
        return Loss(mean * len(batch[1]), len(batch[1]))
"""


def naive_task(folder: Path) -> str:
    """The same CLIP with its loss as a mean over samples, as the accumulation of any trainer computes it."""
    path = folder / "naive_tasks.py"
    path.write_text("from bsearch import Loss\n" + TASKS.read_text() + "\n\n" + NAIVE)
    return f"{path}:Naive"


def study_of(task: str, folder: str, name: str, **more: Any) -> dict[str, Any]:
    training: dict[str, Any] = {"evaluations": 4, **more.pop("training", {})}
    return {
        "study": Path(name).name.lower(),
        "task": task if ":" in task else f"{TASKS}:{task}",
        "space": {
            "effective_batch": {"low": 16, "high": 512},
            "reference_rate": {"low": 3e-4, "high": 2e-2, "at_batch": 128},
            "rule": "sqrt",
            "optimizer": "adamw",
            "epochs": {"low": 2, "high": 8},
            "dataset": "folder",
            "root": folder,
            **_PARAMETERS,
        },
        "memory": {"limit": more.pop("limit", LIMIT)},
        "training": training,
        "budget": {"trials": 30, "profile_s": 15},
        "storage": f"sqlite:///{name}.db",
    } | more


def study(folder: str) -> None:
    """A study of batch and rate, and the same one split naively."""
    with tempfile.TemporaryDirectory() as temporary:
        at = Path(temporary)
        for name, task, training in (
            ("cached", "CLIP", {}),
            ("naive", naive_task(at), {"accept_inexact": True}),
        ):
            values = study_of(task, folder, str(at / name), training=training, limit="8MiB")
            path = at / f"{name}.yaml"
            path.write_text(yaml.safe_dump(values))
            found: Study = run_study(str(path))
            print(f"\n{name}:")
            print(found.front.to_frame().to_string())
            print(
                found.trials.to_frame()[
                    ["accuracy", "train_s", "effective_batch", "micro_batch", "epochs"]
                ].to_string()
            )


if __name__ == "__main__":
    images, *chosen = sys.argv[1:]
    for one in chosen or ["gradients", "costs", "study"]:
        {"gradients": gradients, "costs": costs, "study": study}[one](str(Path(images).resolve()))
