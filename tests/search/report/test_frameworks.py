"""One trial's settings in the words of other frameworks: what they say, and that those frameworks train so."""

from __future__ import annotations

import ast
import json
import math
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
from bsearch.spaces.learning_rate import OptimizerSettings
from bsearch.spaces.plan import BatchPlan, plan_batch, step_sizes
from bsearch.spaces.record import TrialFacts, TrialRecord
from bsearch.spaces.schedule import SCHEDULES, rate_factor
from bsearch.spaces.study.file import study_from_dict
from bsearch.spaces.study.training import Training
from bsearch.spaces.trial import TrialSetup
from click.testing import CliRunner, Result
from conftest import small_study
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import TensorDataset

# Language models have tests of their own.
GENERAL = [name for name in FRAMEWORKS if name not in LANGUAGE]

GOLDEN = Path(__file__).parents[2] / "golden"
PROGRAMS = ["hf", "lightning", "accelerate", "pytorch"]
EVEN = ["hf", "lightning", "accelerate", "deepspeed"]


def bsearch(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def chosen(
    plan: BatchPlan | int = 32,
    cap: int | None = None,
    budget: int = 256,
    epochs: float = 2,
    facts: dict[str, Any] | None = None,
    study: dict[str, Any] | None = None,
    parameters: dict[str, Any] | None = None,
    **training: Any,
) -> ChosenSettings:
    """Settings of a made-up trial of a made-up study: two epochs of 128 samples unless told otherwise."""
    plan = BatchPlan(plan) if isinstance(plan, int) else plan
    spec = study_from_dict(small_study(**{"memory": {"largest_micro_batch": cap}, **(study or {})}))
    setup = TrialSetup(
        study="small",
        number=3,
        attempt=0,
        plan=plan,
        optimizer=OptimizerSettings(0.1 * plan.effective_batch / 64, weight_decay=0.0),
        samples_budget=budget,
        training=Training.model_validate(training),
        epochs=epochs,
        rule="linear",
        reference_rate=0.1,
        reference_batch=64,
        largest_micro_batch=cap,
        parameters=parameters or {},
    )
    known = {"optimizer": "SGD", "momentum": 0.9, "nesterov": True, **(facts or {})}
    values = {"effective_batch": plan.effective_batch, "reference_rate": 0.1, "rule": "linear"}
    record = TrialRecord(3, "complete", values, TrialFacts.of(known), 12.5, 0.875)
    stored = StoredStudy("sqlite://", spec.study, spec, {}, 0.0, (record,), ParetoFront((record,)))
    # Nothing known of the training code: what programs say then, they say of any.
    return replace(settings_of(stored, record, setup, "the knee"), kind=None)


def rates(settings: ChosenSettings, sizes: list[int], peak: float) -> list[float]:
    """The learning rate of each step, as the training loop of bsearch sets it."""
    training, seen, found = settings.setup.training, 0, []
    for size in sizes:
        found.append(peak * rate_factor(training.schedule, training.warmup, (seen + size / 2) / sum(sizes)))
        seen += size
    return found


def program(settings: ChosenSettings, framework: str) -> dict[str, Any]:
    """The names that a pasted program defines."""
    names: dict[str, Any] = {"__name__": "pasted", "__file__": "pasted.py"}
    exec(compile(FRAMEWORKS[framework](settings).text, "pasted.py", "exec"), names)  # noqa: S102
    return names


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


def run_script(text: str, folder: Path, launcher: list[str]) -> dict[str, torch.Tensor]:
    script = folder / "train.py"
    script.write_text(text.replace("    train()\n", "    torch.save(train().state_dict(), 'model.pt')\n"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *launcher, "train.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "256 samples seen; score" in done.stdout
    return torch.load(folder / "model.pt", weights_only=True)


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
    exported = bsearch("export", finished_study, "--to", "pytorch", "--trial", "best")
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
    result = bsearch("export", study, "--to", "yaml", "--trial", member["trial"])
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
    assert yaml.safe_load(bsearch("export", study, "--to", "yaml", "--trial", "best").stdout)["trial"] == best["trial"]
    near = [bsearch("export", study, "--to", "yaml", "--within", share).stdout for share in ("90%", "0.9")]
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
        (["--to", "hf", "--what", "trials"], "--what is for tables: with --to csv or json"),
        (["--to", "optuna", "--what", "trials"], "--what is for tables: with --to csv or json"),
        (["--trial", "1"], "choose a trial for a framework; add --to hf, lightning"),
        (["--to", "json", "--within", "1%"], "choose a trial for a framework; add --to hf, lightning"),
        (["--to", "hf", "--trial", "last"], "expected a trial's number, best or knee; got 'last'"),
        (["--to", "hf", "--within", "110%"], "expected a share >= 0 and < 1, got '110%'"),
        (["--to", "hf", "--within", "near"], "expected a share >= 0 and < 1, got 'near'"),
        (["--to", "keras"], "'keras' is not one of"),
    ],
)
def test_what_cannot_be_meant_is_refused(study_file: Callable[..., Path], options: list[str], words: str) -> None:
    result = bsearch("export", study_file(), *options)
    assert result.exit_code == 2
    assert words in result.stderr


# ---------------------------------------------------------------- the frameworks themselves


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A few points with labels, as Trainer likes them."""

    def __init__(self, samples: int) -> None:
        self.inputs = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
        self.labels = self.inputs.argmax(1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


class Counts(nn.Module):
    """Counts the samples it was trained on since the last step of the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)
        self.seen = 0

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen += len(labels)
        logits = self.net(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    def taken(self) -> int:
        seen, self.seen = self.seen, 0
        return seen


# Epochs of whole steps; and epochs that end with a shorter one.
TRAININGS = [
    (BatchPlan(32, 2), 128, [32] * 8),
    (BatchPlan(33, 3), 128, [33, 33, 33, 29] * 2),
]
frameworks = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(("plan", "samples", "sizes"), TRAININGS)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
class TestRealFrameworks:
    pytestmark = frameworks

    def test_trainer(self, plan: BatchPlan, samples: int, sizes: list[int], optimizer: str, tmp_path: Path) -> None:
        transformers = pytest.importorskip("transformers")
        settings = chosen(plan, facts={"optimizer": optimizer}, schedule="linear", warmup=0.25)
        os.environ["WANDB_DISABLED"] = "true"
        script = program(settings, "hf")
        arguments = script["arguments"]
        assert arguments.train_batch_size * arguments.gradient_accumulation_steps == settings.even.effective_batch
        arguments.output_dir, arguments.report_to, arguments.save_strategy = str(tmp_path), [], "no"
        model, found = Counts(), []

        class Watch(transformers.TrainerCallback):
            def on_optimizer_step(self, *given: Any, optimizer: Any = None, **named: Any) -> None:
                found.append(model.taken())

        made = (script["optimizer"](model), None) if "optimizer" in script else (None, None)
        trainer = transformers.Trainer(
            model=model, args=arguments, train_dataset=Rows(samples), optimizers=made, callbacks=[Watch()]
        )
        trainer.train()
        assert found == sizes
        group = trainer.optimizer.param_groups[0]
        assert type(getattr(trainer.optimizer, "optimizer", trainer.optimizer)).__name__ == optimizer
        assert group["initial_lr"] == settings.even_settings.learning_rate

    def test_trainers_wsd_is_ours(self, plan: BatchPlan, samples: int, sizes: list[int], optimizer: str) -> None:
        transformers = pytest.importorskip("transformers")
        settings = chosen(plan, facts={"optimizer": optimizer}, budget=samples * 50, epochs=50, schedule="wsd", warmup=0.25)
        arguments, steps = program(settings, "hf")["arguments"], settings.even_steps
        made = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
        scheduler = transformers.get_scheduler(
            arguments.lr_scheduler_type,
            made,
            num_warmup_steps=arguments.warmup_steps,
            num_training_steps=steps,
            scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,
        )
        found = []
        for _ in range(steps):
            found.append(made.param_groups[0]["lr"])
            made.step()
            scheduler.step()
        ours = [0.1 * rate_factor("wsd", 0.25, step / steps) for step in range(steps)]
        step_down = 0.1 / (0.15 * steps)  # by which the rate falls
        assert found == pytest.approx(ours, abs=1.01 * step_down)

    def test_lightning(self, plan: BatchPlan, samples: int, sizes: list[int], optimizer: str, tmp_path: Path) -> None:
        pytest.importorskip("lightning")
        settings = chosen(plan, facts={"optimizer": optimizer}, warmup=0.25)
        script = program(settings, "lightning")
        found: list[tuple[int, float]] = []

        class Module(script["Tuned"]):
            def __init__(self) -> None:
                super().__init__()
                self.counts = Counts()

            def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
                return self.counts(**batch)["loss"]

            def optimizer_step(self, epoch: int, number: int, made: Any, closure: Any = None) -> None:
                made.step(closure=closure)
                found.append((self.counts.taken(), made.param_groups[0]["lr"]))

        trainer = script["trainer"](
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(Module(), script["train_loader"](Rows(samples)))
        assert [size for size, _ in found] == sizes
        if len(set(sizes)) == 1:
            assert [rate for _, rate in found] == pytest.approx(rates(settings, sizes, settings.setup.learning_rate), rel=1e-9)

    def test_accelerate(self, plan: BatchPlan, samples: int, sizes: list[int], optimizer: str) -> None:
        pytest.importorskip("accelerate")
        settings = chosen(plan, facts={"optimizer": optimizer}, warmup=0.25, clip_norm=1.0)
        script = program(settings, "accelerate")
        model, found = Counts(), []

        def watch(made: torch.optim.Optimizer, *_: Any) -> None:
            found.append((model.taken(), made.param_groups[0]["lr"]))

        handle = register_optimizer_step_post_hook(watch)
        try:
            script["train"](model, Rows(samples), lambda model, batch: model(**batch)["loss"])
        finally:
            handle.remove()
        assert [size for size, _ in found] == sizes
        if len(set(sizes)) == 1:
            assert [rate for _, rate in found] == pytest.approx(rates(settings, sizes, settings.setup.learning_rate), rel=1e-9)


TWO_DEVICES = {
    "accelerate": """
register_optimizer_step_post_hook(lambda *_: found.append(model.taken()))
train(model, Rows(130), lambda model, batch: model(**batch)["loss"])
""",
    "hf": """
from transformers import Trainer, TrainerCallback
class Watch(TrainerCallback):
    def on_optimizer_step(self, *given, **named): found.append(model.taken())
arguments.report_to, arguments.save_strategy = [], "no"
Trainer(
    model=model, args=arguments, train_dataset=Rows(130), optimizers=(optimizer(model), None), callbacks=[Watch()]
).train()
""",
}


@pytest.mark.frameworks
@pytest.mark.parametrize("framework", TWO_DEVICES)
def test_on_two_devices_each_sees_half_of_the_batch(framework: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers" if framework == "hf" else "accelerate")
    settings = chosen(BatchPlan(32, 2, 2), budget=260)
    watched = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parents[2])!r}, {str(Path(__file__).parent)!r}]
from test_frameworks import Counts, Rows, register_optimizer_step_post_hook
found, model = [], Counts()
{TWO_DEVICES[framework]}
import os, pathlib, torch
pathlib.Path(os.environ["RANK"] + ".txt").write_text(repr(found))
torch.distributed.barrier()
os._exit(0)  # gloo's threads may abort a process while it ends, even after destroy_process_group
"""
    (tmp_path / "train.py").write_text(FRAMEWORKS[framework](settings).text + watched)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(launcher, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    # Two epochs of 130 samples: 16 on each device; the last 2 are filled up to a pass on each, as the note says.
    for rank in range(2):
        assert ast.literal_eval((tmp_path / f"{rank}.txt").read_text()) == [16, 16, 16, 16, 8] * 2
    assert settings.even_steps == 10
    assert "padded with" in " ".join(FRAMEWORKS[framework](settings).notes)


@pytest.mark.frameworks
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW"])
def test_deepspeed_reads_its_configuration(
    schedule: str, optimizer: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    config = pytest.importorskip("deepspeed.runtime.config", reason="deepspeed is not installed")
    from deepspeed.runtime import lr_schedules

    settings = chosen(
        BatchPlan(33, 3),
        budget=128 * 12,
        epochs=12,
        facts={"optimizer": optimizer},
        schedule=schedule,
        warmup=0.25,
        clip_norm=0.5,
    )
    document = json.loads(FRAMEWORKS["deepspeed"](settings).text)
    read = config.DeepSpeedConfig(document)
    assert read.train_batch_size == settings.even.effective_batch == 33
    assert (read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps) == (11, 3)
    assert read.gradient_clipping == 0.5
    keywords = dict(read.optimizer_params)
    keywords.pop("adam_w_mode", None)
    made = getattr(torch.optim, {"adam": "Adam", "adamw": "AdamW"}.get(read.optimizer_name, read.optimizer_name))(
        Counts().parameters(), **keywords
    )
    scheduler = getattr(lr_schedules, read.scheduler_name)(made, **read.scheduler_params)
    running = []
    for _ in range(settings.running_steps):
        running.append(made.param_groups[0]["lr"])
        scheduler.step()
    training = settings.setup.training
    steps = settings.running_steps
    peak = settings.setup.learning_rate
    # Its schedules run up to one and a half steps behind ours.
    slope = max(1 / settings.warmup_steps(steps), math.pi / 2 / (steps * (1 - training.warmup)))
    assert running[:2] == [0, 0]
    for step, rate in enumerate(running):
        ours = peak * rate_factor(training.schedule, training.warmup, max(step - 1, 0) / steps)
        assert rate == pytest.approx(ours, abs=1e-9 * peak if training.schedule != "cosine" else 1.01 * slope * peak)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_deepspeeds_product_rule_holds(devices: int) -> None:
    for batch, micro_batches in product(range(devices, 80), (1, 2, 3)):
        document = json.loads(FRAMEWORKS["deepspeed"](chosen(BatchPlan(batch, min(micro_batches, batch), devices))).text)
        product_of = document["train_micro_batch_size_per_gpu"] * document["gradient_accumulation_steps"] * devices
        assert document["train_batch_size"] == product_of
