"""What a lent card is asked, in three stages of at most nine minutes: `card-1`, `card-2`, `card-3`.

On a CPU the same runs with small models, to rehearse it.
"""

from __future__ import annotations

import math
import os
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import torch
import yaml
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ....objectives.attempts import start_attempt
from ....objectives.machine.device_memory import EXPANDABLE_SEGMENTS, release_memory
from ....search.store.stored import StoredStudy
from ....spaces.learning_rate import OptimizerSettings
from ....spaces.plan import BatchPlan
from ....spaces.trial import Measurement, TrialSetup
from ..claims import Claim, Data, Fact
from ..stage import Found, Stage
from .memory import largest_under, peaks_of
from .speed import law_against, our_loop, plain_loop, rounds_within, timed_values
from .tasks import GPU_MODELS, IMAGES, SMALL_GPT, TINY_GPT, TOKENS, Tokens, setup_of, task_of
from .training import command, killed_after, train_loss, trials_of

# Batches at and beside powers of two and the edges of tiles.
_SIZES = (120, 127, 128, 129, 136, 192, 248, 255, 256, 257, 264, 384, 500, 511, 512, 513)
_CIFAR = "cifar10-images.tar.xz"


def times(stage: Stage) -> Iterator[Found]:
    """Step times of models that fill a card, predicted beside measured, eager and compiled; speeds beside powers of two."""
    if gpu := stage.device == "gpu":
        images = {"samples": 1024, "image_size": 224}
        gpt = GPU_MODELS[4][1][1] | {"tokens": 1024}
        cases = [
            ("resnet50 at 224", IMAGES, images | {"model": "resnet50"}, 512, {}),
            ("GPT 124M, 1,024 tokens", TOKENS, gpt, 64, {}),
            ("vit_b_16 at 224", IMAGES, images | {"model": "vit_b_16"}, 512, {}),
        ]
    else:
        images = {"samples": 1024, "image_size": 16}
        cases = [
            ("small_cnn at 16", IMAGES, images | {"model": "small_cnn"}, 64, {}),
            ("small GPT", TOKENS, TINY_GPT, 64, {}),
        ]
    fits = not gpu or torch.cuda.mem_get_info()[0] > 80 << 30
    precision = {"precision": "bf16"} if gpu else {}
    parts = len(cases) * (1 + gpu) + 2  # the sizes and the largest micro-batches are one each
    for compiles in (False, True)[: 1 + gpu]:
        for place, (name, reference, parameters, highest, how) in enumerate(cases):
            if stage.expired:
                yield Fact(name, "not measured: out of time")
                continue
            release_memory(stage.device)
            setup = setup_of(BatchPlan(2), stage.device, parameters, compile=compiles, **how, **precision)
            told = ", ".join([name, *precision.values(), *["compiled"] * compiles])
            share_s = stage.left_s / parts
            parts -= 1
            yield from law_against(
                stage, told, reference, setup, highest if fits else highest // 4, 0.7 * share_s
            )
            if place == 0 and not compiles:
                plans = [BatchPlan(size if gpu else size // 8) for size in _SIZES]
                rounds = rounds_within(reference, setup, plans, share_s)
                parts -= 1
                yield Data("speeds", told, timed_values(plans, rounds))
    # The same convolutional net and transformer as the stage `largest`, and a larger card.
    yield from largest_under(stage, ((1, 8192), (4, 24576), (1, 81920)) if gpu else ((1, 48), (4, 96)))


def race(stage: Stage) -> Iterator[Found]:
    """A whole study, killed halfway and resumed, its model trained and kept; then as long of TPE by hand."""
    with tempfile.TemporaryDirectory(prefix="bsearch-verify-") as name:
        folder, gpu = Path(name), stage.device == "gpu"
        parameters = _images(folder, gpu)
        yield Fact("data of the race", str(parameters.get("dataset", "digits")))
        seconds = max((stage.left_s - 40) / 2, 20.0)
        space = {
            "effective_batch": {"low": 16, "high": 8192 if gpu else 512},
            "reference_rate": {"low": 0.003, "high": 3.0, "at_batch": 128},
            "epochs": {"low": 1, "high": 6},
        }
        task = "bsearch.objectives.vision:Vision" if parameters else "bsearch.objectives.digits:Digits"
        study = {
            "study": "race",
            "task": task,
            "space": {**space, **parameters},
            "devices": {"kind": stage.device},
            "training": {"evaluations": 2},
            "budget": {"trials": 1000, "hours": seconds / 3600, "profile_s": 5},
        }
        path = folder / "study.yaml"
        path.write_text(yaml.safe_dump(study, sort_keys=False))
        before = killed_after(
            path, replace(stage, seconds=stage.seconds - stage.left_s + seconds / 2), finished=1000
        )
        yield Fact("trials that had ended when it was killed", str(len(before)))
        done = subprocess.run(command(path, stage), cwd=folder, capture_output=True, text=True, check=False)
        records = StoredStudy.open(str(path)).records
        after = trials_of(path)
        lost = [number for number, found in before.items() if after.get(number) != found]
        yield Claim(
            "finished trials lost to SIGKILL, race", 0, float(len(lost)), unit="", note=f"of {len(before)}"
        )
        yield Fact("end of the study", f"exit code {done.returncode}")
        keep = ["train", str(path), "--pick", "within:1%", "--keep", str(folder / "model"), "--serial"]
        kept = subprocess.run(
            [*command(path, stage)[:3], *keep], cwd=folder, capture_output=True, text=True, check=False
        )
        yield Claim(
            "kept models that were not written", 0, float(not list(folder.glob("model/**/model.pt"))), unit=""
        )
        yield Fact(
            "training of the kept model", " / ".join((kept.stdout or kept.stderr).strip().splitlines()[-3:])
        )
        ours = [
            (record.train_s, record.accuracy)
            for record in records
            if record.accuracy is not None and record.train_s
        ]
        theirs, failed = _by_hand(task, setup_of(BatchPlan(1), stage.device, parameters), space, seconds)
        yield Data("fronts", "race", {"ours": ours, "tpe by hand": theirs, "failed by hand": failed})
        yield Fact("trials: bsearch, TPE by hand (failed)", f"{len(ours)}, {len(theirs)} ({failed})")
        ends = [seconds for seconds, _ in (*ours, *theirs)]
        areas = [_area(points, min(ends), max(ends)) for points in (ours, theirs)]
        yield Fact(
            "area of the front in log seconds and accuracy: bsearch, TPE by hand",
            f"{areas[0]:.3f}, {areas[1]:.3f}",
        )


def features(stage: Stage) -> Iterator[Found]:
    """fp16 and bf16 against fp32, activation checkpointing, and where the loop's own time goes."""
    gpt = SMALL_GPT if stage.device == "gpu" else TINY_GPT
    setup = replace(
        setup_of(BatchPlan(32), stage.device, gpt), samples_budget=2048, optimizer=OptimizerSettings(1e-3)
    )
    losses = {precision: train_loss(TOKENS, _in(setup, precision)) for precision in ("fp32", "bf16", "fp16")}
    for precision in ("bf16", "fp16"):
        yield Claim(
            f"training loss, {precision} against fp32", 0.02, abs(losses[precision] / losses["fp32"] - 1)
        )
    large = GPU_MODELS[4][1][1] if stage.device == "gpu" else gpt
    found, untraced = peaks_of(Checkpointed(), setup_of(BatchPlan(1), stage.device, large), (1, 4, 12))
    values = {"device": stage.device, "expandable": EXPANDABLE_SEGMENTS, "sizes": found, "untraced": untraced}
    yield Data("peaks", "GPT with activation checkpointing", values)
    steps = our_loop(task_of(TOKENS), setup)
    digits = task_of("bsearch.objectives.digits:Digits")
    for what, steps in (
        ("ours", our_loop(digits, setup_of(BatchPlan(1000), stage.device))),
        ("minimal", plain_loop(digits, 1000, stage.device, {})),
    ):
        steps(20)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            steps(50)
        events = sorted(profile.key_averages(), key=lambda event: -event.self_cpu_time_total)
        told = ", ".join(
            f"{one.key} {one.self_cpu_time_total / 50:.0f} µs ({one.count / 50:g})" for one in events[:12]
        )
        yield Fact(
            f"host's time of a step of digits at 1,000, {what} (calls)",
            f"{1e6 * steps(50) / 50:.0f} µs: {told}",
        )


class Checkpointed(Tokens):
    """A language model whose blocks are computed again in the backward pass."""

    def model(self, setup: TrialSetup) -> torch.nn.Module:
        model = super().model(setup)
        model.blocks = torch.nn.ModuleList(map(Recomputed, model.blocks))  # type: ignore[arg-type]
        return model


class Recomputed(torch.nn.Module):
    """A module that is computed again in the backward pass."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        return checkpoint(self.inner, hidden, use_reentrant=False)  # type: ignore[no-any-return]


def _in(setup: TrialSetup, precision: str) -> TrialSetup:
    return replace(setup, training=setup.training.model_copy(update={"precision": precision}))


def _images(folder: Path, gpu: bool) -> dict[str, Any]:
    """CIFAR-10 as the parameters of `Vision`, where its images are here; else none."""
    places = (
        Path(os.environ.get("BSEARCH_DATA", "shared/data")),
        Path("shared/data"),
        Path("../shared/data"),
    )
    archive = next((place / _CIFAR for place in places if (place / _CIFAR).is_file()), None)
    if archive is None:
        return {}
    with tarfile.open(archive) as images:
        images.extractall(folder / "data", filter="data")
    values = {"dataset": "folder", "root": str(folder / "data"), "augment": "flip"}
    if gpu:
        return values | {"model": "resnet18", "image_size": 32}
    return values | {
        "model": "small_cnn",
        "image_size": 16,
        "train_samples": 2000,
        "evaluation_samples": 1000,
    }


def _by_hand(
    task: str, setup: TrialSetup, space: dict[str, Any], seconds: float
) -> tuple[list[tuple[float, float]], int]:
    """(Seconds, accuracy) of trials by Optuna's TPE, whose batches come whole, and how many failed."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        directions=["minimize", "maximize"], sampler=optuna.samplers.TPESampler(seed=0, multivariate=True)
    )
    samples = len(task_of(task).data(setup).train)  # type: ignore[arg-type]
    points, failed, ends = [], 0, time.monotonic() + seconds
    batch, rate, epochs = (space[name] for name in ("effective_batch", "reference_rate", "epochs"))
    while time.monotonic() < ends:
        trial = study.ask()
        size = trial.suggest_int("batch", batch["low"], batch["high"], log=True)
        lr = trial.suggest_float("rate", rate["low"], rate["high"], log=True)
        passes = trial.suggest_int("epochs", epochs["low"], epochs["high"])
        chosen = replace(
            setup,
            plan=BatchPlan(size),
            optimizer=OptimizerSettings(lr),
            epochs=passes,
            samples_budget=passes * samples,
        )
        last: Measurement | None = None
        for found in start_attempt(task, chosen):
            last = found if isinstance(found, Measurement) else last
        if last is None or last.accuracy is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            failed += 1
            continue
        study.tell(trial, [last.elapsed_s, last.accuracy])
        points.append((last.elapsed_s, last.accuracy))
    return points, failed


def _area(points: Sequence[tuple[float, float]], fastest: float, slowest: float) -> float:
    """Area in log seconds and accuracy that the points dominate."""
    area, best = 0.0, 0.0
    for seconds, accuracy in sorted(points):
        if accuracy > best:
            area += (accuracy - best) * math.log(slowest / max(seconds, fastest))
            best = accuracy
    return area
