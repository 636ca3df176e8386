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
from bsearch.cli import main
from bsearch.objectives.data.batches import epoch_order
from bsearch.objectives.task import Data, Loss, Task
from bsearch.objectives.task_code import task_kind
from bsearch.objectives.training import TrainingRun
from bsearch.search.report.frameworks import FRAMEWORKS
from bsearch.search.report.frameworks.language import LANGUAGE
from bsearch.search.report.frameworks.settings import ChosenSettings, nearest_even_plan, settings_of
from bsearch.search.store.stored import StoredStudy
from bsearch.spaces.front import ParetoFront
from bsearch.spaces.plan import BatchPlan, plan_batch, step_sizes
from bsearch.spaces.record import TrialFacts, TrialRecord
from bsearch.spaces.schedule import SCHEDULES
from bsearch.spaces.study.file import study_from_dict
from bsearch.spaces.trial import TrialSetup
from click.testing import CliRunner, Result
from conftest import small_study
from exported_settings import chosen, program, rates, run_script
from torch import nn
from torch.utils.data import TensorDataset

# Language models have tests of their own.
GENERAL = [name for name in FRAMEWORKS if name not in LANGUAGE]

GOLDEN = Path(__file__).parents[2] / "golden"
PROGRAMS = ["hf", "lightning", "accelerate", "pytorch"]
EVEN = ["hf", "lightning", "accelerate", "deepspeed"]


def bsearch(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


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
    for word in ("effective batch 501", "4 devices", "at most 96 samples", "504 = 4 x 63 x 2", "+0.6 %", "by rule linear"):
        assert word in note
    assert all(note in FRAMEWORKS[framework](settings).notes for framework in EVEN)
    assert note not in FRAMEWORKS["pytorch"](settings).notes


def test_a_rule_that_ends_between_the_batches_keeps_the_rate_and_says_so() -> None:
    study = {"space": {**small_study()["space"], "rule": "adam_sde", "reference_rate": {"value": 0.1, "at_batch": 64}}}
    study["training"] = {"betas": (0.0, 0.999)}
    settings = chosen(BatchPlan(33, 2, 2), study=study)
    settings = replace(settings, setup=replace(settings.setup, rule="adam_sde"))
    stored_spec = study_from_dict(small_study(**study))
    record = TrialRecord(3, "complete", {"effective_batch": 33}, TrialFacts(), 1.0, 0.5)
    stored = StoredStudy("sqlite://", "small", stored_spec, {}, 0.0, (record,), ParetoFront((record,)))
    again = settings_of(stored, record, settings.setup, "the knee")
    assert again.even.effective_batch != 33
    # At batch 32, kappa is 1/2 and the rule holds; from 64 on it does not.
    assert again.even_settings.betas[0] == pytest.approx(0.5)
    large = settings_of(stored, record, replace(settings.setup, plan=BatchPlan(129, 1, 2)), "the knee")
    assert large.even_settings == large.setup.optimizer
    assert "the learning rate stays that of batch 129" in large.even_notes[0]


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
    # To agree on a new text: BSEARCH_WRITE_GOLDEN=1 pytest tests/test_frameworks.py -k agreed, and read the diff.
    settings = chosen(48, budget=300, epochs=3) if case == "plain" else chosen(**WORST)
    if case == "uneven":
        settings = replace(settings, setup=replace(settings.setup, device="gpu"))
    pasted = FRAMEWORKS[framework](settings)
    text = pasted.text + "".join(f"stderr: {note}\n" for note in pasted.notes)
    golden = GOLDEN / f"export-{framework}-{case}.txt"
    if os.environ.get("BSEARCH_WRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("framework", PROGRAMS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_every_program_is_python_under_every_setting(framework: str, precision: str, schedule: str) -> None:
    for devices, warmup, switches, optimizer in product(
        (1, 3), (0, 0.1), (False, True), ("SGD", "Adam", "AdamW", "Shampoo", None)
    ):
        more = dict.fromkeys(("compile", "channels_last", "cudnn_benchmark", "sync_batch_norm"), switches)
        plan = BatchPlan(33, 2, devices)
        settings = chosen(plan, facts={"optimizer": optimizer}, precision=precision, schedule=schedule, warmup=warmup, **more)
        pasted = FRAMEWORKS[framework](settings)
        ast.parse(pasted.text)
        assert all(len(line) <= 160 for line in pasted.text.splitlines())
        assert ("AdamW is a placeholder" in " ".join(pasted.notes)) == (optimizer in ("Shampoo", None))


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
    assert ast.dump(ast.parse(text)) == ast.dump(ast.parse(FRAMEWORKS[framework](settings).text))
    assert "49" not in text


@pytest.mark.parametrize(
    ("optimizer", "name", "betas"),
    [
        ("AdamW8bit", "adamw_bnb_8bit", (0.9, 0.999)),
        ("Lion", "lion_32bit", (0.9, 0.99)),
        ("Lion8bit", "lion_8bit", (0.9, 0.99)),
    ],
)
def test_trainers_know_optimizers_of_bitsandbytes(optimizer: str, name: str, betas: tuple[float, float]) -> None:
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
    assert document["steps"] == len(list(step_sizes(256, 33)))


# ---------------------------------------------------------------- the plain script


class Net(Task):
    """A small net in double precision, whose loss counts samples, tokens or class weights."""

    kind = "samples"

    def data(self, setup: TrialSetup) -> Data:
        generator = torch.Generator().manual_seed(3)
        inputs = torch.randn(100, 6, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, 5, (100,), generator=generator)
        if self.kind == "ignored":
            labels[torch.rand(100, generator=generator) < 0.3] = -100
        return Data(TensorDataset(inputs, labels), TensorDataset(inputs, labels))

    def model(self, setup: TrialSetup) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5)).double()

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        inputs, labels = batch
        weights = torch.arange(1, 6, dtype=torch.float64) if self.kind == "weights" else None
        total = nn.functional.cross_entropy(model(inputs), labels, weights, reduction="sum")
        if self.kind == "weights":
            return Loss(total, torch.arange(1, 6, dtype=torch.float64)[labels].sum())
        return Loss(total, (labels >= 0).sum())


def script_of(settings: ChosenSettings, task: Net) -> dict[str, Any]:
    """The pasted script with the task's data and model, in the trial's order."""
    script = program(settings, "pytorch")
    data = task.data(settings.setup)
    script["data"] = lambda: (data.train, data.validation)
    script["model"] = lambda: task.model(settings.setup)
    script["order"] = lambda samples, epoch: epoch_order(samples, settings.setup.seed, epoch).tolist()
    return script


@pytest.mark.parametrize("kind", ["samples", "ignored", "weights"])
@pytest.mark.parametrize(("batch", "micro_batches", "clip_norm"), [(32, 1, None), (33, 2, 0.5), (47, 3, None), (100, 4, 1.0)])
def test_the_script_trains_to_the_parameters_that_bsearch_trained_to(
    kind: str, batch: int, micro_batches: int, clip_norm: float | None
) -> None:
    settings = chosen(
        BatchPlan(batch, micro_batches), budget=250, epochs=2.5, clip_norm=clip_norm, facts={"ghost_batch": 1}, seed=7
    )
    task = Net()
    task.kind = kind
    run = TrainingRun(task, settings.setup)
    list(run.measurements())

    script = script_of(settings, task)

    def loss(net: nn.Module, batch: Any) -> tuple[Any, Any]:
        made = task.loss(net, batch, settings.setup)
        return made.total, made.denominator

    script["loss"] = loss
    trained = script["train"]()
    for ours, theirs in zip(run.model.state_dict().values(), trained.state_dict().values(), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("warmup", [0.0, 0.25])
def test_a_schedule_of_ones_own_is_called_by_the_scripts_and_named_in_a_note_of_every_other_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warmup: float
) -> None:
    name = f"own_schedule_{int(100 * warmup)}"
    (tmp_path / f"{name}.py").write_text("def mine(fraction):\n    return 1.0 - fraction * fraction\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    settings = chosen(BatchPlan(33, 2), budget=250, epochs=2.5, schedule=f"{name}.py:mine", warmup=warmup)
    settings = replace(settings, setup=replace(settings.setup, folder=str(tmp_path)))
    run = TrainingRun(Net(), settings.setup)
    list(run.measurements())
    trained = script_of(settings, Net())["train"]()
    for ours, theirs in zip(run.model.parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-11, atol=1e-12)
    for framework in GENERAL:
        made = FRAMEWORKS[framework](settings)
        called = framework in ("pytorch", "lightning", "accelerate")
        assert ("SCHEDULE = import_module(" in made.text) == called
        assert (f"the trial's schedule is {name}.py:mine" in " ".join(made.notes)) == (not called and framework != "yaml")
        assert framework not in PROGRAMS or ast.parse(made.text)
    assert "constant_with_warmup" in FRAMEWORKS["hf"](settings).text


@pytest.mark.parametrize("scaling", ["half_life", "constant"])
def test_an_average_of_weights_is_in_the_script_and_in_a_note_of_every_other_text(scaling: str) -> None:
    settings = chosen(BatchPlan(33, 2), budget=250, epochs=2.5, ema=0.9, ema_scaling=scaling)
    settings = replace(settings, setup=replace(settings.setup, reference_batch=20))
    run = TrainingRun(Net(), settings.setup)
    list(run.measurements())
    trained = script_of(settings, Net())["train"]()
    for ours, theirs in zip(run.averages, trained.parameters(), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-11, atol=1e-12)
    for framework in set(GENERAL) - {"pytorch", "yaml"}:
        notes = " ".join(FRAMEWORKS[framework](settings).notes)
        assert f"get_ema_multi_avg_fn({settings.setup.ema_decay(settings.even.effective_batch):.9g})" in notes
    assert "ema: 0.9\n" in FRAMEWORKS["yaml"](settings).text


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_script_trains_alike_in_low_precision(precision: str) -> None:
    settings = chosen(BatchPlan(33, 2), budget=250, epochs=2.5, precision=precision, clip_norm=0.5, channels_last=True)

    class Single(Net):
        def data(self, setup: TrialSetup) -> Data:
            made = super().data(setup).train
            data = TensorDataset(made.tensors[0].float(), made.tensors[1])
            return Data(data, data)

        def model(self, setup: TrialSetup) -> nn.Module:
            return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))

    task = Single()
    run = TrainingRun(task, settings.setup)
    list(run.measurements())
    script = script_of(settings, task)
    trained = script["train"]()
    for ours, theirs in zip(run.model.state_dict().values(), trained.state_dict().values(), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("batch", [7, 33, 64])
def test_the_script_sees_exactly_the_batch_at_exactly_the_rate(schedule: str, batch: int) -> None:
    settings = chosen(BatchPlan(batch, 2), budget=250, epochs=2.5, schedule=schedule, warmup=0.1, facts={"momentum": 0.0})
    script = program(settings, "pytorch")
    seen: list[int] = []
    found: list[tuple[int, float]] = []
    plain_loss, plain_optimizer = script["loss"], script["optimizer"]

    def loss(net: nn.Module, batch: Any) -> Any:
        if net.training:
            seen.append(len(batch[1]))
        return plain_loss(net, batch)

    def optimizer(net: nn.Module) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = plain_optimizer(net)
        made.register_step_post_hook(lambda made, *_: (found.append((sum(seen), made.param_groups[0]["lr"])), seen.clear())[0])
        return made

    script |= {"loss": loss, "optimizer": optimizer}
    script["train"]()
    sizes = list(step_sizes(250, batch))
    assert [size for size, _ in found] == sizes
    assert [rate for _, rate in found] == pytest.approx(rates(settings, sizes, settings.setup.learning_rate), rel=1e-12)


@pytest.mark.slow
def test_the_script_runs_alone_and_on_two_devices_with_the_same_result(tmp_path: Path) -> None:
    trained = []
    for devices, launcher in ((1, []), (2, ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"])):
        text = FRAMEWORKS["pytorch"](chosen(BatchPlan(33, 2, devices))).text
        assert "bsearch" not in "".join(line for line in text.splitlines() if not line.startswith("#"))
        (tmp_path / str(devices)).mkdir()
        trained.append(run_script(text, tmp_path / str(devices), launcher))
    for alone, together in zip(*(state.values() for state in trained), strict=True):
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_script_of_a_task_trains_that_task_as_the_trial_did(finished_study: Path, tmp_path: Path) -> None:
    stored = StoredStudy.open(str(finished_study))
    best = stored.front.trials[-1]
    exported = bsearch("export", finished_study, "--to", "pytorch", "--pick", "best")
    assert "import_module('tasks_for_tests').Points()" in exported.stdout
    assert "bsearch train" in exported.stderr
    (tmp_path / "train.py").write_text(exported.stdout)
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    # Its own order of samples, so another run of the same training.
    seen, score = re.fullmatch(r"(\d+) samples seen; score ([\d.]+)\n", done.stdout).groups()  # type: ignore[union-attr]
    assert int(seen) == stored.setup_of(best).samples_budget
    assert float(score) == pytest.approx(best.accuracy, abs=0.05)


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("class Mine(Task): pass", "task"),
        ("def Mine(setup): yield 1", "loop"),
        ("from bsearch.objectives.adapters.huggingface import train_with\ndef Mine(setup): yield 1", "huggingface"),
        ("from bsearch.objectives.adapters.lightning import train_with\ndef Mine(setup): yield 1", "lightning"),
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
    by = {kind: FRAMEWORKS["hf"](replace(adam_chosen(), kind=kind)).notes for kind in (None, "huggingface", "loop")}
    assert [any(decayed in note for note in notes) for notes in by.values()] == [True, False, True]
    assert [any("a loop of its own" in note for note in notes) for notes in by.values()] == [False, False, True]


def adam_chosen() -> ChosenSettings:
    """A trial of AdamW with weight decay."""
    settings = chosen(facts={"optimizer": "AdamW", "momentum": None, "nesterov": None})
    return replace(settings, even_settings=replace(settings.even_settings, weight_decay=0.1))


def test_a_script_for_two_devices_says_how_it_is_started(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FRAMEWORKS["pytorch"](chosen(BatchPlan(33, 2, 2))).text)
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 1
    assert "torchrun --nproc-per-node 2" in done.stderr


# ---------------------------------------------------------------- the command


@pytest.mark.slow
def test_the_command_prints_one_trials_settings_and_says_which(study_file: Callable[..., Path], tmp_path: Path) -> None:
    study = study_file()
    assert bsearch("run", study, "--serial").exit_code == 0
    front = json.loads(bsearch("export", study, "--to", "json").stdout)
    member = front["front"][0]
    result = bsearch("export", study, "--to", "yaml", "--pick", member["trial"])
    assert result.exit_code == 0, result.output
    settings = yaml.safe_load(result.stdout)
    same = ("trial", "effective_batch", "micro_batch", "accumulation", "devices", "learning_rate", "train_s", "steps", "rule")
    assert {name: settings[name] for name in same} == {name: member[name] for name in same}
    assert (settings["optimizer"], settings["momentum"], settings["nesterov"]) == ("SGD", 0.9, True)
    assert f"trial {member['trial']} (as asked): accuracy" in result.stderr

    best = front["front"][-1]
    default = yaml.safe_load(bsearch("export", study, "--to", "yaml").stdout)
    within = [one["trial"] for one in front["front"] if one["accuracy"] >= 0.99 * best["accuracy"]]
    assert default["trial"] == within[0]
    assert yaml.safe_load(bsearch("export", study, "--to", "yaml", "--pick", "best").stdout)["trial"] == best["trial"]
    near = [bsearch("export", study, "--to", "yaml", "--pick", f"within:{share}").stdout for share in ("90%", "0.9")]
    assert near[0] == near[1]
    assert yaml.safe_load(near[0])["trial"] == member["trial"]
    for framework in GENERAL:
        out = tmp_path / f"{framework}.txt"
        result = bsearch("export", study, "--to", framework, "--out", out)
        assert (result.exit_code, result.stdout) == (0, "")
        assert out.read_text() == bsearch("export", study, "--to", framework).stdout


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("DELETE FROM bsearch_attempt", "trained outside `bsearch run`"),
        ("UPDATE bsearch_attempt SET setup = '{}'", "an attempt at trial 0 of study small (bsearch_attempt): setup.study: "),
        (
            "UPDATE bsearch_attempt SET setup = json_set(setup, '$.optimizer.learning_rate', 'print(1)')",
            "setup.optimizer.learning_rate: input should be a valid number",
        ),
        ("UPDATE bsearch_attempt SET setup = json_set(setup, '$.optimizer.betas', json('[0.9, {}]'))", "betas.1: input"),
        ("UPDATE bsearch_attempt SET setup = json_set(setup, '$.samples_budget', 0)", "samples_budget: expected a"),
        ("UPDATE bsearch_attempt SET setup = json_set(setup, '$.training.schedule', 'x')", "setup.training.schedule: "),
        ("UPDATE bsearch_attempt SET setup = json_set(setup, '$.glow', 1)", "setup: expected keys of this version, got glow"),
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
        (["--pick", "1"], "choose a trial for a framework; add --to hf, lightning"),
        (["--to", "json", "--pick", "within:1%"], "choose a trial for a framework; add --to hf, lightning"),
        (
            ["--to", "hf", "--pick", "last"],
            "one of best, knee, within:1%, reaches:.9, cheapest:.9; got 'last'",
        ),
        (["--to", "hf", "--pick", "within:110%"], "expected a share >= 0 and < 1, got '110%'"),
        (["--to", "hf", "--pick", "within:near"], "expected a share >= 0 and < 1, got 'near'"),
        (["--to", "keras"], "'keras' is not one of"),
    ],
)
def test_what_cannot_be_meant_is_refused(study_file: Callable[..., Path], options: list[str], words: str) -> None:
    result = bsearch("export", study_file(), *options)
    assert result.exit_code == 2
    assert words in result.stderr
