"""The command line as a user meets it: help, documents, messages, exit codes."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import click
import optuna
import pytest
import yaml
from bsearch import run as run_in_python
from bsearch.cli import main
from bsearch.commands.group import SECTIONS
from bsearch.search.report.frameworks import FRAMEWORKS
from bsearch.search.run import driver
from bsearch.search.sources.read import runs_of
from bsearch.search.store.stored import StoredStudy
from bsearch.spaces.errors import TerminatedError
from bsearch.spaces.study.file import parse_study
from bsearch.spaces.study.spec import StudySpec, Tracker
from conftest import BSEARCH, TASKS
from helpers import SPACE, bsearch

GOLDEN = Path(__file__).parent / "golden"
# `check` times steps for five seconds where the study says nothing.
BRIEFLY_TIMED = {"trials": 4, "profile_s": 0.1}
POINTS = """
from torch import nn
from bsearch import Data, Loss, Task
from torch.utils.data import TensorDataset
import torch
class Mine(Task):
    def data(self, setup):
        points = TensorDataset(torch.randn(400, 2), torch.zeros(400, dtype=torch.int64))
        return Data(points, points)
    def model(self, setup): return nn.Linear(2, 2)
"""
COMMANDS = sorted(main.commands)
JOBS = ["jobs status", "jobs logs", "jobs stop"]


@pytest.mark.parametrize("command", ["", *COMMANDS, *JOBS])
def test_help_is_as_it_was_agreed(command: str) -> None:
    # To agree on a new text: BSEARCH_WRITE_GOLDEN=1 pytest tests/test_cli.py, and read the diff.
    result = bsearch(*command.split(), "--help")
    assert result.exit_code == 0
    golden = GOLDEN / f"help-{command.replace(' ', '-') or 'bsearch'}.txt"
    if os.environ.get("BSEARCH_WRITE_GOLDEN"):
        golden.write_text(result.output)
    assert result.output == golden.read_text()
    if command:
        assert "Example:" in result.output


def test_every_command_is_told_by_the_help() -> None:
    told = {name: line for section in SECTIONS.values() for name, (_, line) in section.items()}
    assert sorted(told) == COMMANDS
    assert sum(map(len, SECTIONS.values())) == len(COMMANDS)
    lines = bsearch("--help").output.splitlines()
    assert all(
        any(line.endswith(f" {text}") and f"  {name} " in line for line in lines)
        for name, text in told.items()
    )


def options_of(command: click.Command, path: str) -> Iterator[tuple[str, click.Option]]:
    """Every option of a command and of those below it, with the command's words."""
    for option in command.params:
        if isinstance(option, click.Option):
            yield path, option
    for name, below in getattr(command, "commands", {}).items():
        yield from options_of(below, f"{path} {name}")


EVERY_OPTION = [found for name, command in main.commands.items() for found in options_of(command, name)]


def test_the_doors_stay_few() -> None:
    # Upper bounds, which only go down: whoever adds a command or an option takes another away.
    assert len(main.commands) <= 16
    assert len(EVERY_OPTION) <= 85


def test_no_name_of_an_option_means_two_things() -> None:
    """The same name has the same type, the same value and the same first words of its help in every command."""
    meanings: dict[str, dict[tuple[object, ...], str]] = {}
    for command, option in EVERY_OPTION:
        words = re.split(r"[:.;]", option.help or "", maxsplit=1)[0]
        meaning = (type(option.type), option.metavar, option.is_flag, words)
        for name in (*option.opts, *option.secondary_opts):
            meanings.setdefault(name, {})[meaning] = command
    assert {name: found for name, found in meanings.items() if len(found) > 1} == {}
    assert all(option.help for _, option in EVERY_OPTION)


def test_a_study_runs_shows_and_exports(study_file: Callable[..., Path]) -> None:
    path = study_file(
        budget={"trials": 5}, baseline=[{"effective_batch": 64, "reference_rate": 0.1, "rule": "sqrt"}]
    )
    run = bsearch("run", path, "--serial")
    assert run.exit_code == 0, run.output
    assert "Front of small: " in run.output
    assert "Baseline (trial 0" in run.output
    assert "[5/5] trial 4 complete: accuracy" in run.output
    folder = path.parent / "results" / "small"
    assert sorted(file.name for file in folder.iterdir()) == ["front.csv", "front.json"]
    document = json.loads((folder / "front.json").read_text())
    shown = json.loads(bsearch("show", path, "--json").output)
    assert [trial["trial"] for trial in shown["front"]] == [trial["trial"] for trial in document["front"]]
    rows = list(csv.DictReader(bsearch("export", path).output.splitlines()))
    assert [int(row["trial"]) for row in rows] == [row["trial"] for row in document["front"]]
    assert len(list(csv.DictReader(bsearch("export", path, "--all").output.splitlines()))) == 5
    assert len(json.loads(bsearch("export", path, "--all", "--to", "json").output)["all"]) == 5
    url = f"sqlite:///{path.parent}/small.db"
    assert bsearch("show", url).output == bsearch("show", path).output
    assert "complete" in bsearch("show", path, "--all").output
    one = json.loads(bsearch("show", path, "--pick", 2, "--json").output)
    assert len(one["curve"]) == 2
    assert "samples_per_s" in bsearch("show", path, "--pick", 2).output
    missing = bsearch("show", path, "--pick", 99)
    assert (missing.exit_code, "has no trial 99; its trials are numbered 0 to 4" in missing.output) == (
        2,
        True,
    )


@pytest.mark.slow
@pytest.mark.long
def test_a_task_runs_without_a_study_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = [
        "--batches",
        "16:300",
        "--rate",
        "1e-2:1@64",
        "--set",
        "space.epochs=1:3",
        "--set",
        "space.rule=linear,sqrt",
        "--trials",
        3,
        "--serial",
    ]
    result = bsearch("run", f"{TASKS}:Points", *options)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "points.db").exists()
    assert (tmp_path / "results" / "points" / "front.csv").exists()
    again = bsearch("run", f"{TASKS}:Points", *options)
    assert "points has met its budget: 3 of 3 trials are done" in again.output
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    for wrong, message in [
        (["--batches", "16:300"], "a task needs --batches LOW:HIGH and --rate LOW:HIGH"),
        (["--batches", "a:b", "--rate", "1:2"], "--batches: expected LOW:HIGH such as 16:4096, got 'a'"),
        (
            ["--batches", "16:300", "--rate", "1:2", "--set", "width"],
            "--set: expected SECTION.KEY=VALUE such as training",
        ),
        (
            ["--batches", "16:300", "--rate", "1:2", "--set", "space.wdth=3"],
            "space.wdth: expected a parameter that the task reads",
        ),
        (
            ["--batches", "9:3", "--rate", "1:2"],
            "space.effective_batch: expected low <= high, got low 9 and high 3",
        ),
    ]:
        refused = bsearch("run", f"{TASKS}:Points", *wrong)
        assert refused.exit_code == 2
        assert message in refused.output


@pytest.mark.slow
@pytest.mark.long
def test_parameters_of_a_task_are_set_or_searched_without_a_study_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.py").write_text(
        POINTS + "    def model(self, setup): return nn.Linear(2, 2 + 0 * setup.parameters['width'])\n"
    )
    options = ["--batches", "16:300", "--rate", "0.1", "--set", "space.epochs=1", "--trials", "2", "--serial"]
    missing = bsearch("run", "tasks.py:Mine", *options)
    assert missing.exit_code == 2 and "got 'width'. Add it under space: in study.yaml" in missing.output
    result = bsearch("run", "tasks.py:Mine", *options, "--set", "space.width=32,64")
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(bsearch("export", "sqlite:///mine.db", "--all").output.splitlines()))
    assert {row["width"] for row in rows} <= {"32", "64"}
    path = tmp_path / "study.yaml"
    space = "{effective_batch: {low: 8, high: 64}, reference_rate: {low: 0.01, high: 0.1, at_batch: 32}, epochs: 1}"
    path.write_text(f"study: a\ntask: tasks.py:Mine\nspace: {space}\n")
    refused = bsearch("run", path, "--set", "width=3")
    assert "Write space.width=3 for a parameter of the task." in refused.output


def test_a_key_set_for_one_command_is_kept_or_refused_by_name(study_file: Callable[..., Path]) -> None:
    path = study_file(budget={"trials": 1}, training={"evaluations": 2, "samples": 1197})
    faulty = ["--set", "training.precision=fp17", "--set", "budget.trials=many", "--set", "trainig.seed=3"]
    refused = bsearch("check", path, *faulty)
    assert (refused.exit_code, refused.output.splitlines()) == (
        2,
        [
            "--set: training.precision: expected one of fp32, tf32, bf16, fp16; got 'fp17'. Did you mean 'fp16'?",
            "--set: budget.trials: expected an integer, got 'many'",
            "--set: trainig: unknown key. Did you mean 'training'? Valid keys: "
            + ", ".join(StudySpec.model_fields),
        ],
    )
    for wrong, words in [
        (
            "seed=3",
            "expected SECTION.KEY=VALUE such as training.precision=bf16, got 'seed=3'. Write space.seed=3",
        ),
        ("training.seed", "expected SECTION.KEY=VALUE"),
        ("objectives.metric.name=f1", "expected SECTION.KEY=VALUE"),
        (
            "space.reference_rate=1",
            "expected a key other than space.reference_rate. Change it in the study file, or with --rate",
        ),
        ("storage=sqlite:///x.db", "such as training.precision=bf16, got 'storage=sqlite:///x.db'.\n"),
    ]:
        assert words in bsearch("run", path, "--set", wrong).output
    twice = bsearch("run", path, "--set", "training.seed=1", "--set", "training.seed=2")
    assert "expected training.seed once, got it twice" in twice.output
    assert (
        bsearch("run", path, "--serial", "--set", "training.seed=5", "--set", "space.epochs=1").exit_code == 0
    )
    stored = StoredStudy.open(str(path))
    assert (stored.spec.training.seed, stored.spec.training.evaluations, stored.spec.space.epochs.value) == (
        5,
        2,
        1,
    )
    assert {record.facts.epochs for record in stored.records} == {1}
    # Without it the file says something else again, which is another experiment.
    assert "training.seed: was 5, now 0" in bsearch("run", path, "--serial").output


def test_five_faults_are_five_messages_and_nothing_is_written(study_file: Callable[..., Path]) -> None:
    path = study_file()
    text = (
        path.read_text()
        .replace("low: 16", "low: 0")
        .replace("- sqrt", "- sqr")
        .replace("epochs: 2", "epochs: -2")
    )
    path.write_text(text.replace("trials: 4", "trials: no").replace("evaluations: 2", "evalutions: 2"))
    result = bsearch("run", path)
    assert result.exit_code == 2
    lines = result.output.splitlines()
    assert [line.split(": ")[1] for line in lines] == [
        "space.effective_batch",
        "space.rule",
        "space.epochs",
        "training.evalutions",
        "budget.trials",
    ]
    assert all(line.startswith(f"{path}:") for line in lines)
    assert os.listdir(path.parent) == ["study.yaml"]


def test_no_without_quotes_is_refused_where_a_key_is_set(study_file: Callable[..., Path]) -> None:
    result = bsearch("check", study_file(), "--set", "training.compile=no")
    assert result.exit_code == 2
    assert "--set training.compile: expected true or false, or text in quotes, got no" in result.output


def test_a_call_that_times_out_once_sigterm_has_come_is_terminated(
    study_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ray's calls do where it is slow to end."""

    def slow(*arguments: object, **options: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        except TerminatedError:
            raise TimeoutError("Get timed out") from None

    monkeypatch.setattr(driver, "run_study", slow)
    result = bsearch("run", study_file(), "--serial")
    assert (result.exit_code, result.output.splitlines()[-1]) == (143, "terminated")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"space": {"effective_batch": {"low": 1, "high": 5000}, "reference_rate": 0.1}},
            ":4: space.effective_batch: expected at most the training set's 1197 samples, got 5000",
        ),
        (
            {
                "space": {"effective_batch": 64, "reference_rate": 0.1, "rule": "adam_sde"},
                "budget": BRIEFLY_TIMED,
            },
            "space.rule: expected a rule for SGD, which has no betas of Adam's kind; got 'adam_sde'",
        ),
        (
            {
                "space": {
                    "effective_batch": 64,
                    "reference_rate": 0.1,
                    "rule": "adamw_tau",
                    "weight_decay": 0.1,
                },
                "budget": BRIEFLY_TIMED,
            },
            "space.rule: expected a rule for SGD, whose weight decay is part of the gradient; got 'adamw_tau'",
        ),
        (
            {
                "task": f"{TASKS}:NoDecay",
                "space": {
                    "effective_batch": 64,
                    "reference_rate": 0.1,
                    "weight_decay": {"low": 1e-3, "high": 0.1},
                },
                "budget": BRIEFLY_TIMED,
            },
            "space.weight_decay: expected a task whose SGD applies it, got one that does not",
        ),
        (
            {
                "space": {
                    "effective_batch": 64,
                    "reference_rate": 0.1,
                    "rule": "adamw_tau",
                    "weight_decay": 0.1,
                    "optimizer": "adam",
                },
                "budget": BRIEFLY_TIMED,
            },
            "space.rule: expected a rule for Adam, whose weight decay is part of the gradient; got 'adamw_tau'",
        ),
        (
            {"space": {"effective_batch": 64, "reference_rate": 0.1, "depth": 3}},
            "space.depth: expected a parameter that the task reads, got one that it never read",
        ),
        ({"task": f"{TASKS}:NoSamples"}, "train: expected at least one sample, got an empty dataset"),
        ({"task": f"{TASKS}:PerSampleLoss"}, "expected a scalar sum over 1 samples, got shape (1,)"),
        ({"task": f"{TASKS}:NanAtOnce"}, "expected a finite loss from the new model's first batch, got nan"),
        ({"task": f"{TASKS}:own_loop"}, "training.samples: expected the size of the training set"),
        ({"task": f"{TASKS}:Missing"}, "to define 'Missing', but it does not"),
        ({"task": "nowhere.py:Mine"}, "nowhere.py: no such file"),
        ({"storage": "mysql+pymysql://h/d"}, "the database's driver 'pymysql' is not installed"),
        ({"storage": "sqlite:////sys/study/s.db"}, "expected a writable folder, but /sys/study"),
    ],
)
@pytest.mark.parametrize("command", ["run", pytest.param("check", marks=pytest.mark.slow)])
def test_bad_input_is_told_without_a_traceback(
    study_file: Callable[..., Path], command: str, changes: dict[str, object], message: str
) -> None:
    path = study_file(**changes)
    result = bsearch(command, path, *(["--serial"] if command == "run" else []))
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("ask", ["--until", "0.95", "--metric", "loss:minimize"]),
        ("ask", ["--metric", "loss"]),
        ("check", ["--machine", "--batch", "32"]),
        ("check", ["--serial"]),
        ("check", ["--schema"]),
    ],
)
def test_an_option_without_effect_is_refused(
    study_file: Callable[..., Path], command: str, options: list[str]
) -> None:
    result = bsearch(command, study_file(), *options)
    assert result.exit_code == 2
    assert any(option in result.output.splitlines()[-1] for option in options if option.startswith("--"))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys\nsys.exit(7)\n", "importing it failed at "),
        (POINTS + "    def model(self, setup): raise SystemExit(3)\n", "a test step failed: SystemExit: 3 ("),
        (
            POINTS + "    def model(self, setup): return {}['width']\n",
            "a test step failed: KeyError: 'width' (",
        ),
        (
            POINTS + "    def loss(self, model, batch, setup): return Loss(model(batch[0]).sum(), -3)\n",
            "Mine.loss: expected a denominator >= 0 that the mean divides by, got -3",
        ),
    ],
)
def test_code_that_exits_or_fails_is_told_with_its_line(
    study_file: Callable[..., Path], tmp_path: Path, code: str, message: str
) -> None:
    (tmp_path / "tasks.py").write_text(code)
    for command in ("check", "run"):
        result = bsearch(
            command, study_file(task="tasks.py:Mine"), *(["--serial"] if command == "run" else [])
        )
        assert result.exit_code == 2
        assert message in result.output


@pytest.mark.long
def test_json_is_the_only_thing_on_stdout_whatever_a_task_prints(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "tasks.py").write_text(
        POINTS + "    def model(self, setup): print('hello'); return nn.Linear(2, 2)\n"
    )
    path = study_file(task="tasks.py:Mine", budget={"trials": 1})
    for arguments in (
        ["check", path, "--json"],
        ["run", path, "--serial", "--json"],
        ["profile", path, "--json"],
    ):
        done = subprocess.run([BSEARCH, *arguments], capture_output=True, text=True, check=True)
        *events, last = map(json.loads, done.stdout.splitlines())
        assert last["study"] == "small"
        assert {event["answer"] for event in events} <= {"event"}
        assert "hello" in done.stderr
    for arguments in (["show", str(path), "--json"], ["ask", str(path), "--json"], ["check", "--schema"]):
        assert json.loads(bsearch(*arguments).output)


@pytest.mark.slow
def test_a_deleted_database_is_noticed(study_file: Callable[..., Path], tmp_path: Path) -> None:
    path = study_file(task=f"{TASKS}:Slow", space=SPACE, budget={"trials": 60})
    command = [BSEARCH, "run", path, "--serial"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as driver:
        assert driver.stdout is not None
        while "complete" not in driver.stdout.readline():
            assert driver.poll() is None
        (tmp_path / "small.db").unlink()
        output = driver.stdout.read()
        assert driver.wait(timeout=400) == 1
    assert "small.db was deleted while the study ran" in output


def test_show_and_export_follow_the_study_that_run_goes_on_with(study_file: Callable[..., Path]) -> None:
    first = {"task": f"{TASKS}:Points", "budget": {"trials": 1}}
    assert bsearch("run", study_file(**first), "--serial").exit_code == 0
    second = study_file(**first, training={"evaluations": 3})
    assert bsearch("run", second, "--serial", "--new").exit_code == 0
    assert json.loads(bsearch("show", second, "--json").output)["study"] == "small-2"
    assert (second.parent / "results" / "small-2" / "front.csv").exists()
    assert json.loads(bsearch("show", study_file(**first), "--json").output)["study"] == "small"


def test_show_tells_which_settings_reach_a_target(finished_study: Path) -> None:
    front = json.loads(bsearch("show", finished_study, "--json").output)["front"]
    target = front[0]["accuracy"]
    document = json.loads(bsearch("show", finished_study, "--pick", f"reaches:{target}", "--json").output)
    assert (document["metric"], document["target"]) == ("accuracy", target)
    assert {member["trial"] for member in front} <= {trial["trial"] for trial in document["trials"]}
    assert all(trial["accuracy"] >= target for trial in document["trials"])
    words = bsearch("show", finished_study, "--pick", f"reaches:{target}").output
    assert f"trial {front[0]['trial']} is the fastest to reach it" in " ".join(words.split())
    assert "reaches it; the best has" in " ".join(
        bsearch("show", finished_study, "--pick", "reaches:2").output.split()
    )
    nan = bsearch("show", finished_study, "--pick", "reaches:nan", "--json")
    assert (nan.exit_code, "expected a finite number, got 'nan'" in nan.output) == (2, True)
    refused = bsearch("export", finished_study, "--to", "yaml", "--pick", "reaches:2")
    assert refused.exit_code == 2
    assert "no trial reaches accuracy 2; the best, trial" in refused.output


def test_another_optuna_study_of_that_name_is_not_touched(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    theirs = optuna.create_study(study_name="small", storage=f"sqlite:///{tmp_path}/small.db")
    path = study_file(task=f"{TASKS}:Points", budget={"trials": 2})
    result = bsearch("run", path, "--serial")
    assert result.exit_code == 0, result.output  # only the copy of it for the dashboard is missing
    why = "it holds another study named small, with directions ['minimize']"
    assert f"the copy for Optuna's dashboard is not up to date: {why}" in " ".join(result.output.split())
    assert theirs.trials == []
    assert why in bsearch("export", path, "--to", "optuna").output
    assert bsearch("export", path, "--to", "optuna", "--out", tmp_path / "copy.db").exit_code == 0
    assert len(optuna.load_study(study_name="small", storage=f"sqlite:///{tmp_path}/copy.db").trials) == 2


def test_a_task_file_with_a_syntax_error_is_told(study_file: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text("class Mine(:\n")
    result = bsearch("run", study_file(task="tasks.py:Mine"), "--serial")
    assert result.exit_code == 2
    assert "tasks.py:1: syntax error: " in result.output


def test_a_folder_for_results_that_cannot_be_written_is_told(study_file: Callable[..., Path]) -> None:
    path = study_file(task=f"{TASKS}:Points", budget={"trials": 1})
    result = bsearch("run", path, "--serial", "--out", "/sys/nowhere")
    assert result.exit_code == 1
    assert "/sys/nowhere/front.csv: cannot be written: " in result.output
    assert json.loads(bsearch("show", path, "--json").output)["trials"] == {"complete": 1}


def test_a_failing_study_ends_with_one(study_file: Callable[..., Path]) -> None:
    path = study_file(task=f"{TASKS}:Raises")
    result = bsearch("run", path, "--serial")
    assert result.exit_code == 1
    assert (
        "The study stopped: 3 trials in a row failed with the same error: Raises: ValueError: the score is not ready"
        in result.output
    )
    assert "Traceback" in bsearch("show", path, "--pick", 2).output


@pytest.mark.slow
def test_check_forecasts_the_study(study_file: Callable[..., Path]) -> None:
    path = study_file(
        space={"effective_batch": {"low": 100, "high": 400}, "reference_rate": 0.1, "epochs": 3}
    )
    result = bsearch("check", path)
    assert result.exit_code == 0
    assert "1,197 training samples, 300 validation samples, 17,258 parameters, SGD, on " in result.output
    assert "A trial trains for " in result.output
    document = json.loads(bsearch("check", path, "--json").output)
    batches = [plan["effective_batch"] for plan in document["plans"]]
    assert batches == [100, 141, 200, 283, 400]
    assert document["forecast"]["slowest_trial_s"] >= document["forecast"]["fastest_trial_s"] > 0
    assert any("search `epochs` as well" in advice for advice in document["forecast"]["advice"]) == (
        document["forecast"]["span"] < 2.5
    )
    assert os.listdir(path.parent) == ["study.yaml"]


@pytest.mark.slow
@pytest.mark.long
def test_a_step_of_one_batch_is_told_with_its_weights(study_file: Callable[..., Path]) -> None:
    space = {
        "effective_batch": {"low": 1, "high": 400},
        "reference_rate": {"low": 0.1, "high": 0.2, "at_batch": 64},
    }
    space |= {"rule": ["linear", "sqrt"], "epochs": 1}
    path = study_file(
        task=f"{TASKS}:Points", space=space, memory={"largest_micro_batch": 40}, devices={"per_trial": 2}
    )
    result = bsearch("check", path, "--batch", 257)
    assert result.exit_code == 0, result.output
    assert "257 samples per step = 2 devices x 4 micro-batches of at most 33 samples" in result.output
    assert re.search(r"learning rate 0\.4015\d+ to 0\.8031\d+ \(linear\)", result.output)
    assert "training time of an epoch: 400 samples / 257 per step" in result.output
    (step,) = json.loads(bsearch("check", path, "--batch", 257, "--json").output)["batches"]
    assert sum(weight for device in step["devices"] for weight in device["weights"]) == pytest.approx(
        1, rel=1e-4
    )
    assert [rate["rule"] for rate in step["learning_rates"]] == ["linear", "sqrt"]
    infeasible = bsearch("check", path, "--batch", 1)
    assert (
        infeasible.exit_code,
        "at least one sample for each of 2 devices, got 1" in infeasible.output,
    ) == (2, True)
    large = bsearch("check", path, "--batch", 401)
    assert (
        large.exit_code,
        "--batch: expected at most the 400 training samples, got 401" in large.output,
    ) == (2, True)
    assert "--batch needs a STUDY" in bsearch("check", "--batch", 500).output


@pytest.mark.slow
@pytest.mark.long
def test_rules_of_a_study_are_discriminated_or_it_says_why_not(study_file: Callable[..., Path]) -> None:
    space = {
        "effective_batch": {"low": 8, "high": 400},
        "reference_rate": {"low": 1e-3, "high": 3.0, "at_batch": 64},
        "rule": "auto",
        "epochs": 1,
    }
    path = study_file(space=space, budget={"trials": 22}, sampler="qmc", stopping="none")
    assert bsearch("run", path, "--serial", "--trials", 3).exit_code == 0
    assert "best rate: unknown: 20 complete runs are needed, got 3" in bsearch("ask", path).output
    assert "Best rate against batch" not in bsearch("show", path).output
    run = bsearch("run", path, "--serial")
    assert run.exit_code == 0, run.output
    assert "It grows as the batch to the power of" in bsearch("ask", path).output
    for output in (run.output, bsearch("show", path).output):
        assert "Best rate against batch: " in output
    assert "unknown at batch 5000" in bsearch("ask", path, "--batch", 5000).output


@pytest.mark.slow
def test_check_says_what_auto_means(study_file: Callable[..., Path]) -> None:
    space = {
        "effective_batch": {"low": 100, "high": 400},
        "reference_rate": {"low": 0.01, "high": 1.0},
        "rule": "auto",
    }
    path = study_file(space=space)
    output = bsearch("check", path).output
    assert "searched: effective_batch, reference_rate, exponent" in output
    assert "rule: power, its exponent searched over 0.0 to 1.0; afterwards `bsearch ask " in output
    assert "or auto: power with its exponent searched" in bsearch("check", "--schema").output


def test_the_schema_knows_every_key_and_takes_what_we_write(tmp_path: Path) -> None:
    schema = json.loads(bsearch("check", "--schema").output)
    validator = pytest.importorskip("jsonschema").Draft202012Validator(schema)
    assert bsearch("init", tmp_path / "mine").exit_code == 0
    readme = (
        (Path(__file__).parent.parent / "README.md").read_text().partition("```yaml\n")[2].partition("```")[0]
    )
    examples = [path.read_text() for path in (Path(__file__).parent.parent / "examples").glob("*.yaml")]
    for text in (readme, (tmp_path / "mine" / "study.yaml").read_text(), *examples):
        parse_study(text)
        # Editors read YAML 1.2, where 1e-3 is a number; PyYAML's own loader takes it for text.
        data = yaml.safe_load(re.sub(r"\b(\d+)e-(\d)\b", r"\1.0e-\2", text))
        assert [error.message for error in validator.iter_errors(data)] == []
    assert list(validator.iter_errors({"study": "a", "task": "b", "space": {}, "bugdet": 1}))
    assert {
        "study",
        "task",
        "space",
        "training",
        "memory",
        "devices",
        "budget",
        "objectives",
        "baseline",
    } <= set(schema["properties"])


@pytest.mark.slow
def test_init_writes_what_runs_unchanged(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    result = bsearch("init", folder)
    assert result.exit_code == 0
    assert yaml.safe_load((folder / "study.yaml").read_text())["task"] == "tasks.py:MyTask"
    # Unchanged but for how long it takes.
    study = run_in_python(
        folder / "study.yaml", serial=True, progress=False, budget={"trials": 3, "profile_s": 1}
    )
    assert len(study.trials) == 3
    assert study.trials[0].is_baseline
    again = bsearch("init", folder)
    assert (
        again.exit_code,
        "already contains study.yaml and tasks.py; nothing was written" in again.output,
    ) == (2, True)


def test_our_own_bugs_show_no_traceback_without_debug(
    study_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr("bsearch.search.run.driver.run_study", broken)
    path = study_file(task=f"{TASKS}:Points")
    result = bsearch("run", path, "--serial")
    assert result.exit_code == 1
    assert "internal error: RuntimeError: a bug of ours" in result.output
    assert "Traceback" not in result.output
    assert "Traceback" in bsearch("--debug", "run", path, "--serial").output


def test_a_reader_that_has_enough_is_no_error() -> None:
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {BSEARCH} check --schema | head -1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "{\n"
    assert "Traceback" not in done.stderr
    assert sys.version_info >= (3, 11)


def test_what_is_typed_before_a_study_loads_nothing_heavy(study_file: Callable[..., Path]) -> None:
    code = (
        "import sys\nfrom bsearch.cli import main\n"
        "main(standalone_mode=False, prog_name='bsearch', args=sys.argv[1:])\n"
        "print([name for name in ('torch', 'ray', 'optuna', 'pandas', 'sklearn') if name in sys.modules], file=sys.stderr)"
    )
    for arguments in (["--help"], ["run", "--help"], ["check", "--schema"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
        )
        assert done.stderr.splitlines()[-1] == "[]"


def test_every_framework_can_be_named() -> None:
    option = next(option for option in main.commands["export"].params if option.name == "to")
    assert isinstance(option.type, click.Choice)
    # Their names apart from their functions, which take a second to import.
    assert list(option.type.choices) == ["csv", "json", *FRAMEWORKS, *get_args(Tracker), "optuna"]


def completed(folder: Path, words: str, shell: str = "bash") -> list[str]:
    """What a shell is given to complete the last of the words."""
    environment = {**os.environ, "_BSEARCH_COMPLETE": f"{shell}_complete", "COMP_WORDS": words}
    environment["COMP_CWORD"] = str(len(words.split(" ")) - 1)
    done = subprocess.run([BSEARCH], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


@pytest.mark.slow
def test_shells_complete_commands_and_files(study_file: Callable[..., Path], tmp_path: Path) -> None:
    path = study_file()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "other.yml").touch()
    (tmp_path / "study.txt").touch()
    assert completed(tmp_path, "bsearch das") == ["plain,dashboard"]
    assert completed(tmp_path, "bsearch run s") == ["dir,s", "plain,study.yaml"]
    assert completed(tmp_path, "bsearch show sub/") == ["dir,sub/", "plain,sub/other.yml"]
    assert path.exists()


def test_watching_is_for_people(study_file: Callable[..., Path]) -> None:
    for option in (["--json"], ["--all"], ["--pick", "best"]):
        refused = bsearch("show", study_file(), "--watch", *option)
        assert (refused.exit_code, "programs can poll `show --json`" in refused.output) == (2, True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "study.yaml", "postgresql://ann:hunter2@127.0.0.1:1/d"],
        ["ask", "optuna:postgresql+psycopg://ann:hunter2@127.0.0.1:1/d#s"],
        ["ask", "mlflow:http://ann:hunter2@127.0.0.1:1#e"],
        ["show", "--pick", "postgresql://ann:hunter2@127.0.0.1:1/d"],
    ],
)
def test_a_secret_in_an_argument_is_not_repeated(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    told = bsearch(*arguments)
    assert told.exit_code != 0
    assert "hunter2" not in told.output
    assert ("Got unexpected extra argument" in told.output) is (arguments[0] == "run")


def test_a_source_is_shown_without_its_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "runs.csv"
    table.write_text(
        "bs,lr,val_acc,runtime\n" + "".join(f"{8 * n},{n / 100},{0.5 + n / 100},{n}\n" for n in range(1, 15))
    )
    found = runs_of(str(table))
    monkeypatch.setattr("bsearch.search.sources.read.runs_of", lambda source, say: found)
    source = "optuna:postgresql://ann:hunter2@host/d#s"
    monkeypatch.chdir(tmp_path)
    for arguments in (["ask", source], ["ask", source, "--json"], ["init", "mine", "--from", source]):
        told = bsearch(*arguments)
        assert told.exit_code == 0, told.output
        assert "hunter2" not in told.output
    assert not [path for path in (tmp_path / "mine").iterdir() if "hunter2" in path.read_text()]
