"""A point of a front is trained again: the same model to the bit, in files that load anywhere; or longer, or with new seeds."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch
from bsearch.cluster.study import Study
from bsearch.objectives.loading import load_task
from bsearch.objectives.task import Task
from bsearch.search.run.train import planned_trainings
from bsearch.search.store.stored import StoredStudy
from bsearch.spaces.trial import TrialSetup
from conftest import BSEARCH, TASKS
from helpers import bsearch, run


@pytest.fixture
def finished(finished_study: Path, tmp_path: Path) -> Path:
    """A copy of a finished study, whose results go into a folder of this test."""
    for name in ("study.yaml", "small.db"):
        shutil.copy(finished_study.parent / name, tmp_path)
    return tmp_path / "study.yaml"


def test_the_best_is_trained_again_to_the_bit_and_its_weights_load_anywhere(
    finished: Path, tmp_path: Path
) -> None:
    result = bsearch("train", finished, "--pick", "best", "--serial", "--keep", tmp_path / "model", "--json")
    assert result.exit_code == 0, result.output
    (trained,) = json.loads(result.stdout)["trainings"]
    best = Study(finished).best
    assert best is not None
    assert (trained["outcome"], trained["accuracy"], trained["seed"]) == ("complete", best.accuracy, 0)
    assert trained["files"] == ["log.csv", "model.pt", "optimizer.pt", "training.json"]
    settings = json.loads((tmp_path / "model" / "training.json").read_text())
    assert (settings["trial"], settings["accuracy"]) == (best.number, best.accuracy)
    setup = TrialSetup.from_dict(settings["setup"])
    assert setup.effective_batch == best.settings["effective_batch"]
    # Elsewhere: the task's own model takes the weights, and scores what the study says.
    task = load_task(f"{TASKS}:Points")
    assert isinstance(task, Task)
    model = task.model(setup)
    model.load_state_dict(torch.load(tmp_path / "model" / "model.pt", weights_only=True))
    inputs, labels = task.data(setup).validation.tensors  # type: ignore[attr-defined]
    assert float((model(inputs).argmax(1) == labels).double().mean()) == pytest.approx(
        best.accuracy, abs=1e-12
    )
    torch.load(tmp_path / "model" / "optimizer.pt", weights_only=True)
    with (tmp_path / "model" / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[-1]["accuracy"]) == best.accuracy
    assert int(rows[-1]["samples_seen"]) == setup.samples_budget
    again = bsearch("train", finished, "--pick", "best", "--serial", "--keep", tmp_path / "model")
    assert again.exit_code == 2
    assert "holds this trained model already" in again.output
    other = bsearch(
        "train", finished, "--pick", "best", "--epochs", "3.5", "--serial", "--keep", tmp_path / "model"
    )
    assert other.exit_code == 2
    assert "or one of this training" in other.output
    mine = tmp_path / "project"
    mine.mkdir()
    for name in ("model.pt", "optimizer.pt", "log.csv", "checkpoint.pt"):
        (mine / name).write_text("my own")
    refused = bsearch("train", finished, "--pick", "best", "--serial", "--keep", mine)
    assert (refused.exit_code, "expected an empty folder" in refused.output) == (2, True)
    assert [path.read_text() for path in mine.iterdir()] == ["my own"] * 4
    assert not [*tmp_path.glob(".*bsearch*")]


def test_longer_with_several_seeds(finished: Path) -> None:
    result = bsearch("train", finished, "--serial", "--epochs", "3", "--seeds", "3")
    assert result.exit_code == 0, result.output
    study = Study(finished)
    chosen = study.within("1%")
    folder = finished.parent / "results" / "small" / f"trial-{chosen.number}"
    assert sorted(path.name for path in folder.iterdir()) == ["seed-1", "seed-2", "seed-3"]
    documents = [json.loads((folder / f"seed-{seed}" / "training.json").read_text()) for seed in (1, 2, 3)]
    assert [(one["seed"], one["setup"]["samples_budget"]) for one in documents] == [
        (seed, 1200) for seed in (1, 2, 3)
    ]
    assert "(the fastest within 1% of the best)" in result.output
    assert "mean of 3 seeds: " in result.output
    # As if the second had been interrupted: the same command trains it alone, to the same weights.
    (folder / ".seed-7.bsearch-code").mkdir()
    begun = StoredStudy.open(str(finished))
    made = planned_trainings(begun, begun.records[chosen.number], folder, epochs=3.0, seeds=6)
    assert [one.setup.training.seed for one in made] == [1, 2, 3, 7, 8, 9]
    before = {seed: (folder / f"seed-{seed}" / "model.pt").stat().st_mtime_ns for seed in (1, 2, 3)}
    for path in (folder / "seed-2").iterdir():
        path.unlink()
    assert bsearch("train", finished, "--serial", "--epochs", "3", "--seeds", "3").exit_code == 0
    timed = {"measured_train_s": ANY, "files": ANY}  # the log has times
    assert json.loads((folder / "seed-2" / "training.json").read_text()) == documents[1] | timed
    after = {seed: (folder / f"seed-{seed}" / "model.pt").stat().st_mtime_ns for seed in (1, 2, 3)}
    assert [seed for seed in before if before[seed] != after[seed]] == [2]


def test_a_test_set_is_scored_once_at_the_end(study_file: Callable[..., Path]) -> None:
    path = study_file(
        task="bsearch.objectives.digits:Digits",
        space={"effective_batch": {"low": 40, "high": 80}, "reference_rate": 0.1, "epochs": 0.5},
        budget={"trials": 2, "profile_s": 0},
    )
    study = run(path).study
    assert not any("test_accuracy" in record.facts.extra for record in study.records)
    trained = Study(path).train(trial="best", serial=True, say=lambda line: None)
    assert set(trained[0].tests) == {"test_accuracy", "test_val_loss"}
    assert all("test_accuracy" not in one.facts for one in trained[0].measurements[:-1])


@pytest.mark.slow
def test_a_training_that_was_killed_resumes_and_ends_with_the_same_weights(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    path = study_file(
        task=f"{TASKS}:Slow",
        space={"effective_batch": 40, "reference_rate": {"low": 0.1, "high": 0.2}, "epochs": 2},
        budget={"trials": 1, "profile_s": 0},
        training={"evaluations": 10},
        cluster={"checkpoint_every_s": 0},
    )
    run(path)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert bsearch("train", path, "--pick", "best", "--serial", "--keep", whole).exit_code == 0
    command = [BSEARCH, "train", path, "--pick", "best", "--serial", "--keep", cut]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    limit = time.monotonic() + 400
    while not (checkpoints := [*tmp_path.glob(".cut.bsearch-*.pt")]):
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not cut.exists()
    resumed = Study(path).train(trial="best", serial=True, out=cut, say=lambda line: None)
    assert resumed[0].measurements[-1].facts["resumed_at"]
    assert not checkpoints[0].exists()
    one, other = (torch.load(folder / "model.pt", weights_only=True) for folder in (whole, cut))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_one_that_fails_ends_with_1(study_file: Callable[..., Path], tmp_path: Path) -> None:
    task = tmp_path / "fails.py"
    task.write_text(
        "from bsearch.objectives.digits import Digits\n\n\nclass Fails(Digits):\n    def after_step(self, model, setup):\n"
        "        assert setup.model_folder is None\n"
    )
    path = study_file(task=f"{task}:Fails", budget={"trials": 1})
    assert bsearch("run", path, "--serial").exit_code == 0
    assert bsearch("train", path, "--serial").exit_code == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--pick", "99"], "trial 99 is not on its front"),
        (["--pick", "within:110%"], "expected a share >= 0 and < 1, got '110%'"),
        (["--epochs", "0.0001"], "epochs: expected at least one step"),
        (["--seeds", "0"], "0 is not in the range"),
    ],
)
def test_what_cannot_be_trained_is_told(finished: Path, options: list[str], words: str) -> None:
    result = bsearch("train", finished, "--serial", *options)
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.long
@pytest.mark.ray
def test_over_ray_like_a_trial(finished: Path, tmp_path: Path) -> None:
    best = Study(finished).best
    assert best is not None
    scores = []
    for seeds, folder in ((1, tmp_path / "one"), (2, tmp_path / "two")):
        command = [
            BSEARCH,
            "train",
            finished,
            "--pick",
            "best",
            "--seeds",
            str(seeds),
            "--keep",
            folder,
            "--json",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stderr
        trained = json.loads(done.stdout)["trainings"]
        scores.append([one["accuracy"] for one in trained])
        assert all("model.pt" in one["files"] for one in trained)
    assert scores[0] == [best.accuracy]
    assert len(scores[1]) == 2
