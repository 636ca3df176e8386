"""One trial's settings in the words of other frameworks: what they say."""

from __future__ import annotations

import ast
import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from bsearch.objectives.task_code import task_kind
from bsearch.objectives.training import TrainingRun
from bsearch.search.report.frameworks import FRAMEWORKS
from bsearch.search.report.frameworks.settings import ChosenSettings, nearest_even_plan, settings_of
from bsearch.search.store.stored import StoredStudy
from bsearch.spaces.front import ParetoFront
from bsearch.spaces.plan import BatchPlan, plan_batch, step_sizes
from bsearch.spaces.record import TrialFacts, TrialRecord
from bsearch.spaces.schedule import SCHEDULES
from bsearch.spaces.study.file import study_from_dict
from conftest import small_study
from exported_settings import chosen, program
from helpers import bsearch
from tasks_for_tests import Points

# Language models have tests of their own.
GENERAL = [name for name in FRAMEWORKS if name not in ("trl", "axolotl", "llamafactory")]

GOLDEN = Path(__file__).parents[2] / "golden"
PROGRAMS = ["hf", "lightning", "accelerate", "pytorch"]
EVEN = ["hf", "lightning", "accelerate", "deepspeed"]


# ---------------------------------------------------------------- plans of equal micro-batches


def test_the_nearest_even_plan_is_nearest_and_keeps_the_cap() -> None:
    for batch, devices, cap, smallest in product(range(1, 61), (1, 2, 3, 4), (None, 1, 3, 7, 20), (1, 2)):
        if batch < devices * smallest or (cap is not None and cap < smallest):
            continue
        plan = plan_batch(batch, devices=devices, largest_micro_batch=cap)
        even = nearest_even_plan(plan, cap, smallest)
        assert even.effective_batch == even.devices * even.micro_batch * even.accumulation
        assert even.devices == devices
        assert smallest <= even.micro_batch <= (cap or batch)
        # The slow twin tries every plan there is in at most twice the trial's micro-batches.
        twins = [
            (
                abs(devices * micro * micro_batches - batch),
                micro_batches != plan.accumulation,
                micro_batches,
                devices * micro * micro_batches,
            )
            for micro_batches in range(1, 2 * plan.accumulation + 1)
            for micro in range(smallest, (cap or batch) + 1)
        ]
        kept = even.accumulation != plan.accumulation, even.accumulation, even.effective_batch
        assert (abs(even.effective_batch - batch), *kept) == min(twins)


def test_a_batch_that_passes_can_express_stays() -> None:
    assert nearest_even_plan(BatchPlan(257)).effective_batch == 257
    assert nearest_even_plan(plan_batch(500, devices=4, largest_micro_batch=25), 25).effective_batch == 500
    assert chosen(32).even_notes == ()


def test_another_batch_gets_another_rate_by_the_rule_and_is_told() -> None:
    settings = chosen(plan_batch(501, devices=4, largest_micro_batch=96), cap=96, budget=2000, epochs=1)
    even = settings.even
    assert even.effective_batch == 504
    assert settings.even_settings.learning_rate == pytest.approx(0.1 * 504 / 64)
    note = settings.even_notes[0]
    for word in (
        "effective batch 501",
        "4 devices",
        "at most 96 samples",
        "504 = 4 x 63 x 2",
        "+0.6 %",
        "by rule linear",
    ):
        assert word in note
    assert all(note in FRAMEWORKS[framework](settings).notes for framework in EVEN)
    assert note not in FRAMEWORKS["pytorch"](settings).notes


def test_a_rule_that_ends_between_the_batches_keeps_the_rate_and_says_so() -> None:
    study = {
        "space": {
            **small_study()["space"],
            "rule": "adam_sde",
            "reference_rate": {"value": 0.1, "at_batch": 64},
        }
    }
    study["training"] = {"betas": (0.0, 0.999)}
    settings = chosen(BatchPlan(33, 2, 2), study=study)
    settings = replace(settings, setup=replace(settings.setup, rule="adam_sde"))
    stored_spec = study_from_dict(small_study(**study))
    record = TrialRecord(3, "complete", {"effective_batch": 33}, TrialFacts(), 1.0, 0.5)
    stored = StoredStudy("sqlite://", "small", stored_spec, {}, 0.0, (record,), ParetoFront((record,)))
    again = settings_of(stored, record, settings.setup, "the best")
    assert again.even.effective_batch != 33
    # At batch 32, kappa is 1/2 and the rule holds; from 64 on it does not.
    assert again.even_settings.betas[0] == pytest.approx(0.5)
    large = settings_of(stored, record, replace(settings.setup, plan=BatchPlan(129, 1, 2)), "the best")
    assert large.even_settings == large.setup.optimizer
    assert "the learning rate stays that of batch 129" in large.even_notes[0]


def test_a_step_whose_samples_are_compared_stays_one() -> None:
    """Two micro-batches of 32 accumulated have 31 negatives each, not 63."""
    made = chosen(BatchPlan(64, 2))
    record = TrialRecord(3, "complete", {"effective_batch": 64}, TrialFacts(), 1.0, 0.5)
    stored = StoredStudy(
        "sqlite://", "small", study_from_dict(small_study()), {}, 0.0, (record,), ParetoFront((record,))
    )
    settings = settings_of(stored, record, replace(made.setup, embedding="cached"), "the best")
    assert (settings.even.micro_batch, settings.even.accumulation) == (64, 1)
    (note,) = settings.even_notes
    assert "compares all 64 samples of a step" in note and "mini_batch_size=32" in note
    assert all(note in FRAMEWORKS[framework](settings).notes for framework in EVEN)


# ---------------------------------------------------------------- texts


WORST = {
    "plan": BatchPlan(501, 2, 4),
    "cap": 96,
    "budget": 20_000,
    "facts": {"optimizer": "AdamW", "momentum": None, "ghost_batch": 63},
    "parameters": {"width": 32, "name": "a 'quoted' name"},
    "clip_norm": 1.0,
    "precision": "bf16",
}


@pytest.mark.parametrize("framework", GENERAL)
@pytest.mark.parametrize("case", ["plain", "uneven"])
def test_texts_are_as_they_were_agreed(framework: str, case: str) -> None:
    # To agree on a new text: BSEARCH_WRITE_GOLDEN=1 pytest tests/search/report/test_frameworks.py -k agreed, and read the diff.
    settings = chosen(48, budget=300, epochs=3) if case == "plain" else chosen(**WORST)
    if case == "uneven":
        settings = replace(settings, setup=replace(settings.setup, device="gpu"))
    pasted = FRAMEWORKS[framework](settings)
    text = pasted.text + "".join(f"stderr: {note}\n" for note in pasted.notes)
    golden = GOLDEN / f"export-{framework}-{case}.txt"
    if os.environ.get("BSEARCH_WRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("framework", PROGRAMS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_every_program_is_python_under_every_setting(framework: str, precision: str, schedule: str) -> None:
    for devices, warmup, switches, optimizer in product(
        (1, 3), (0, 0.1), (False, True), ("SGD", "Adam", "AdamW", "Shampoo", None)
    ):
        more = dict.fromkeys(("compile", "sync_batch_norm"), switches)
        plan = BatchPlan(33, 2, devices)
        settings = chosen(
            plan,
            facts={"optimizer": optimizer},
            precision=precision,
            schedule=schedule,
            warmup=warmup,
            **more,
        )
        pasted = FRAMEWORKS[framework](settings)
        ast.parse(pasted.text)
        assert all(len(line) <= 160 for line in pasted.text.splitlines())
        unknown = optimizer in ("Shampoo", None) and framework != "pytorch"
        assert ("AdamW is a placeholder" in " ".join(pasted.notes)) == unknown


HOSTILE = "x\n\"\"\"'''\r\nimport shutil\u2028import this\x0cimport os; {{ 7 * 7 }} {% raw %} \\"


@pytest.mark.parametrize("framework", PROGRAMS)
def test_names_out_of_a_strangers_database_stay_comments(framework: str) -> None:
    settings = chosen(parameters={"width": "w"}, facts={"optimizer": "Shampoo"})
    hostile = replace(
        settings,
        study=HOSTILE,
        metric=HOSTILE,
        chosen=HOSTILE,
        optimizer=HOSTILE,
        even_notes=(HOSTILE,),
        setup=replace(settings.setup, parameters={HOSTILE: HOSTILE, "width": HOSTILE}, rule=HOSTILE),
    )
    text = FRAMEWORKS[framework](hostile).text
    if framework == "pytorch":  # which holds the setup as a mapping
        settings = replace(
            settings, setup=replace(hostile.setup, parameters={"a": "b", "width": "w"}, rule="constant")
        )
    texts = ast.parse(text), ast.parse(FRAMEWORKS[framework](settings).text)
    for node in (node for parsed in texts for node in ast.walk(parsed)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    assert ast.dump(texts[0]) == ast.dump(texts[1])
    assert "49" not in text


@pytest.mark.parametrize(
    ("optimizer", "name", "betas"),
    [
        ("AdamW8bit", "adamw_bnb_8bit", (0.9, 0.999)),
        ("Lion", "lion_32bit", (0.9, 0.99)),
        ("Lion8bit", "lion_8bit", (0.9, 0.99)),
    ],
)
def test_trainers_know_optimizers_of_bitsandbytes(
    optimizer: str, name: str, betas: tuple[float, float]
) -> None:
    made = FRAMEWORKS["hf"](chosen(facts={"optimizer": optimizer}))
    assert f"optim='{name}'" in made.text
    assert f"adam_beta1={betas[0]}" in made.text
    assert f"adam_beta2={betas[1]}" in made.text
    assert f"the trial's optimizer {optimizer} needs bitsandbytes" in made.notes


def test_the_mapping_reads_back_whatever_the_names() -> None:
    settings = replace(chosen(plan_batch(33, largest_micro_batch=20), cap=20), study=HOSTILE)
    document = yaml.safe_load(FRAMEWORKS["yaml"](settings).text)
    assert document["study"] == HOSTILE
    assert (document["effective_batch"], document["micro_batch"], document["accumulation"]) == (33, 17, 2)
    assert document["steps"] == len(list(step_sizes(256, 33, devices=1)))


# ---------------------------------------------------------------- the script


def scripted(settings: ChosenSettings, folder: Path) -> dict[str, torch.Tensor]:
    """The weights that the exported script saves."""
    program(settings, "pytorch")["train"](str(folder))
    (model,) = (path for path in folder.glob("*.pt") if path.name != "optimizer.pt")
    state: dict[str, torch.Tensor] = torch.load(model, weights_only=True)
    return state


def of_task(settings: ChosenSettings, task: str) -> ChosenSettings:
    return replace(settings, task=str(Path(__file__).parents[2] / task))


@pytest.mark.parametrize(
    "training",
    [
        {},
        {"clip_norm": 0.5, "precision": "bf16", "schedule": "wsd", "seed": 7},
        {"ema": 0.9, "schedule": "schedules.py:mine", "warmup": 0.25},
    ],
)
def test_the_script_trains_to_the_parameters_that_bsearch_trained_to(
    training: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "schedules.py").write_text("def mine(fraction):\n    return 1.0 - fraction * fraction\n")
    settings = of_task(
        chosen(BatchPlan(33, 2), budget=250, epochs=2.5, **training), "tasks_for_tests.py:Points"
    )
    settings = replace(
        settings, setup=replace(settings.setup, folder=str(tmp_path), checkpoint="elsewhere", ends_by=1.0)
    )
    run = TrainingRun(Points(), replace(settings.setup, checkpoint=None, ends_by=None))
    list(run.measurements())
    ours = run.averages if training.get("ema") else list(run.model.parameters())
    for mine, theirs in zip(ours, scripted(settings, tmp_path / "model").values(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_script_trains_a_loop_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = of_task(chosen(BatchPlan(48, 2), budget=480, epochs=0.8, seed=3), "loop_tasks.py:classifier")
    assert set(scripted(settings, tmp_path / "model")) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert re.search(r"^480 of 480 samples: accuracy 0\.\d+$", capsys.readouterr().out, re.M)


def test_the_script_ends_with_the_reason_of_a_training_that_fails(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="error: "):
        scripted(of_task(chosen(), "tasks_for_tests.py:Raises"), tmp_path)


@pytest.mark.long
def test_the_script_runs_on_two_devices_with_the_result_of_one(tmp_path: Path) -> None:
    trained = []
    for devices in (1, 2):
        settings = of_task(chosen(BatchPlan(33, 2, devices)), "tasks_for_tests.py:Points")
        folder = tmp_path / str(devices)
        folder.mkdir()
        (folder / "train.py").write_text(FRAMEWORKS["pytorch"](settings).text)
        done = subprocess.run(
            [sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, timeout=400
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert "256 of 256 samples: accuracy" in done.stdout
        trained.append(torch.load(folder / "model" / "model.pt", weights_only=True))
    for alone, together in zip(*(state.values() for state in trained), strict=True):
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_script_of_a_trial_reaches_what_the_trial_reached(finished_study: Path, tmp_path: Path) -> None:
    best = StoredStudy.open(str(finished_study)).front.trials[-1]
    exported = bsearch("export", finished_study, "--to", "pytorch", "--pick", "best")
    assert "bsearch train" in exported.stderr
    (tmp_path / "train.py").write_text(exported.stdout)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) == pytest.approx(best.accuracy, rel=1e-5)


@pytest.mark.parametrize("warmup", [0.0, 0.25])
def test_a_schedule_of_ones_own_is_called_or_named_in_a_note(tmp_path: Path, warmup: float) -> None:
    settings = chosen(BatchPlan(33, 2), budget=250, epochs=2.5, schedule="schedules.py:mine", warmup=warmup)
    settings = replace(settings, setup=replace(settings.setup, folder=str(tmp_path)))
    for framework in GENERAL:
        made = FRAMEWORKS[framework](settings)
        called = framework in ("lightning", "accelerate")
        assert ("SCHEDULE = import_module(" in made.text) == called
        noted = "the trial's schedule is schedules.py:mine" in " ".join(made.notes)
        assert noted == (not called and framework not in ("pytorch", "yaml"))
        assert framework not in PROGRAMS or ast.parse(made.text)
    assert "constant_with_warmup" in FRAMEWORKS["hf"](settings).text
    assert ('"WarmupLR"' in FRAMEWORKS["deepspeed"](settings).text) == (warmup > 0)


def test_an_average_of_weights_is_in_a_note() -> None:
    settings = chosen(BatchPlan(33, 2), ema=0.9)
    settings = replace(settings, setup=replace(settings.setup, reference_batch=20))
    for framework in set(GENERAL) - {"pytorch", "yaml"}:
        notes = " ".join(FRAMEWORKS[framework](settings).notes)
        assert f"get_ema_multi_avg_fn({settings.setup.ema_decay(settings.even.effective_batch):.9g})" in notes
    assert "ema: 0.9\n" in FRAMEWORKS["yaml"](settings).text


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("class Mine(Task): pass", "task"),
        ("def Mine(setup): yield 1", "loop"),
        (
            "from bsearch.objectives.adapters.huggingface import train_with\ndef Mine(setup): yield 1",
            "huggingface",
        ),
        (
            "from bsearch.objectives.adapters.lightning import train_with\ndef Mine(setup): yield 1",
            "lightning",
        ),
        ("Mine = make()", None),
        ("def Mine(", None),
    ],
)
def test_what_training_code_is_shows_in_its_source(source: str, kind: str | None, tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(source)
    assert task_kind(f"{tmp_path}/tasks.py:Mine") == kind
    assert task_kind(f"{tmp_path}/none.py:Mine") is None
    assert task_kind("bsearch.objectives.digits:Digits") == "task"
    assert task_kind("bsearch.objectives.language:CausalLM") == "task"  # which its package imports


def test_notes_are_those_of_what_trained() -> None:
    decayed = "Trainer applies no weight decay to biases"
    by = {
        kind: FRAMEWORKS["hf"](replace(adam_chosen(), kind=kind)).notes
        for kind in (None, "huggingface", "loop")
    }
    assert [any(decayed in note for note in notes) for notes in by.values()] == [True, False, True]
    assert [any("a loop of its own" in note for note in notes) for notes in by.values()] == [
        False,
        False,
        True,
    ]


def adam_chosen() -> ChosenSettings:
    """A trial of AdamW with weight decay."""
    settings = chosen(facts={"optimizer": "AdamW", "momentum": None, "nesterov": None})
    return replace(settings, even_settings=replace(settings.even_settings, weight_decay=0.1))


# ---------------------------------------------------------------- the command


@pytest.mark.slow
def test_the_command_prints_one_trials_settings_and_says_which(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    study = study_file()
    assert bsearch("run", study, "--serial").exit_code == 0
    front = json.loads(bsearch("export", study, "--to", "json").stdout)
    member = front["front"][0]
    result = bsearch("export", study, "--to", "yaml", "--pick", member["trial"])
    assert result.exit_code == 0, result.output
    settings = yaml.safe_load(result.stdout)
    same = (
        "trial",
        "effective_batch",
        "micro_batch",
        "accumulation",
        "devices",
        "learning_rate",
        "train_s",
        "steps",
        "rule",
    )
    assert {name: settings[name] for name in same} == {name: member[name] for name in same}
    assert (settings["optimizer"], settings["momentum"], settings["nesterov"]) == ("SGD", 0.9, True)
    assert f"trial {member['trial']} (as asked): accuracy" in result.stderr

    best = front["front"][-1]
    default = yaml.safe_load(bsearch("export", study, "--to", "yaml").stdout)
    within = [one["trial"] for one in front["front"] if one["accuracy"] >= 0.99 * best["accuracy"]]
    assert default["trial"] == within[0]
    assert (
        yaml.safe_load(bsearch("export", study, "--to", "yaml", "--pick", "best").stdout)["trial"]
        == best["trial"]
    )
    near = [
        bsearch("export", study, "--to", "yaml", "--pick", f"within:{share}").stdout
        for share in ("90%", "0.9")
    ]
    assert near[0] == near[1]
    assert yaml.safe_load(near[0])["trial"] == member["trial"]
    for framework in GENERAL:
        out = tmp_path / f"{framework}.txt"
        result = bsearch("export", study, "--to", framework, "--out", out)
        assert (result.exit_code, result.stdout) == (0, "")
        assert out.read_text() == bsearch("export", study, "--to", framework).stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("DELETE FROM bsearch_attempt", "trained outside `bsearch run`"),
        (
            "UPDATE bsearch_attempt SET setup = '{}'",
            "trial 0 of study small (bsearch_attempt): setup.study: ",
        ),
        (
            "UPDATE bsearch_attempt SET setup = json_set(setup, '$.optimizer.learning_rate', 'print(1)')",
            "setup.optimizer.learning_rate: expected a valid number",
        ),
        (
            "UPDATE bsearch_attempt SET setup = json_set(setup, '$.optimizer.betas', json('[0.9, {}]'))",
            "betas.1: expected",
        ),
        (
            "UPDATE bsearch_attempt SET setup = json_set(setup, '$.samples_budget', 0)",
            "samples_budget: expected a",
        ),
        (
            "UPDATE bsearch_attempt SET setup = json_set(setup, '$.training.schedule', 'x')",
            "setup.training.schedule: ",
        ),
        (
            "UPDATE bsearch_attempt SET setup = json_set(setup, '$.glow', 1)",
            "setup: expected keys of this version, got glow",
        ),
    ],
)
def test_what_a_database_does_not_hold_or_holds_wrongly_is_told(
    study_file: Callable[..., Path], change: str, words: str
) -> None:
    study = study_file(budget={"trials": 1})
    assert bsearch("run", study, "--serial").exit_code == 0
    (database,) = study.parent.glob("*.db")
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute(change)
    result = bsearch("export", study, "--to", "pytorch")
    assert (result.exit_code, result.stdout) == (2 if change.startswith("DELETE") else 1, "")
    assert words in result.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--to", "hf", "--all"], "--all is for tables: with --to csv or json"),
        (["--to", "optuna", "--all"], "--all is for tables: with --to csv or json"),
        (["--pick", "1"], "chooses a trial for a framework; add --to hf, lightning"),
        (["--to", "json", "--pick", "within:1%"], "chooses a trial for a framework; add --to hf, lightning"),
        (
            ["--to", "hf", "--pick", "last"],
            "one of best, within:1%, reaches:.9, cheapest:.9; got 'last'",
        ),
        (["--to", "hf", "--pick", "within:110%"], "expected a share >= 0 and < 1, got '110%'"),
        (["--to", "hf", "--pick", "within:near"], "expected a share >= 0 and < 1, got 'near'"),
        (["--to", "keras"], "'keras' is not one of"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    study_file: Callable[..., Path], options: list[str], words: str
) -> None:
    result = bsearch("export", study_file(), *options)
    assert result.exit_code == 2
    assert words in result.stderr
