"""What is said of an optimizer is what its groups stepped with, whatever the setup has: recorded, exported, told by `check`."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bsearch
import pytest
import torch
import yaml
from bsearch.cli import main
from bsearch.search.report.export import trial_document
from bsearch.search.report.frameworks import FRAMEWORKS
from bsearch.search.report.frameworks.settings import chosen_settings
from bsearch.search.store.stored import StoredStudy
from click.testing import CliRunner
from conftest import small_study
from helpers import run

TASKS = """
import torch
from bsearch import Loop
from torch.optim import SGD, Adam, AdamW, Adamax, NAdam, RAdam
from tasks_for_tests import Points

MADE = {
    "usual": lambda some, rate: AdamW(some, lr=rate),
    "adamw": lambda some, rate: AdamW(some, lr=rate, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3),
    "sgd": lambda some, rate: SGD(some, lr=rate, momentum=0.7, weight_decay=5e-4, dampening=0.1),
    "adam": lambda some, rate: Adam(some, lr=rate, betas=(0.85, 0.97), weight_decay=0.02, amsgrad=True),
    "adamax": lambda some, rate: Adamax(some, lr=rate, betas=(0.7, 0.9), eps=1e-5),
    "nadam": lambda some, rate: NAdam(some, lr=rate, weight_decay=0.05, momentum_decay=0.01, decoupled_weight_decay=True),
    "radam": lambda some, rate: RAdam(some, lr=rate, eps=1e-4, weight_decay=0.01),
}


class Kinds(Points):
    def optimizer(self, model, setup):
        return MADE[setup.parameters["kind"]](model.parameters(), setup.learning_rate)


class Groups(Points):
    def optimizer(self, model, setup):
        matrices = [one for one in model.parameters() if one.dim() > 1]
        others = [one for one in model.parameters() if one.dim() < 2]
        groups = [{"params": others, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.1}]
        return AdamW(groups, lr=setup.learning_rate)


class Changes(Points):
    def optimizer(self, model, setup):
        self.made = SGD(model.parameters(), lr=setup.learning_rate, momentum=0.9)
        self.stepped = 0
        return self.made

    def after_step(self, model, setup):
        self.stepped += 1
        self.made.param_groups[0]["momentum"] = 0.8 if self.stepped == 2 else 0.9


def loop(setup):
    task, model = Points(), torch.nn.Linear(2, 2)
    optimizer = MADE["adamw"](model.parameters(), setup.learning_rate)
    loop = Loop(setup, task.data(setup), {"model": model}, {"optimizer": optimizer})
    for step in loop:
        for part in step:
            inputs, labels = part.batch
            (part.weight * torch.nn.functional.cross_entropy(model(inputs), labels)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step.evaluates:
            yield loop.measure(accuracy=0.5)
"""
KINDS = ("usual", "adamw", "sgd", "adam", "adamax", "nadam", "radam")


def study(folder: Path, task: str, **changes: Any) -> Path:
    (folder / "tasks.py").write_text(TASKS)
    path = folder / "study.yaml"
    fixed = {
        "budget": {"trials": 1, "profile_s": 0},
        "task": f"tasks.py:{task}",
        "stopping": "none",
        **changes,
    }
    path.write_text(yaml.safe_dump(small_study(**fixed), sort_keys=False))
    return path


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> StoredStudy:
    """A study with a trial of each kind of optimizer."""
    space = {
        "effective_batch": 32,
        "reference_rate": 0.01,
        "rule": "constant",
        "epochs": 1,
        "kind": {"choices": list(KINDS)},
    }
    path = study(
        tmp_path_factory.mktemp("kinds"),
        "Kinds",
        space=space,
        baseline=[{"kind": kind} for kind in KINDS],
        budget={"trials": len(KINDS), "profile_s": 0},
    )
    assert not run(path).failure
    return bsearch.Study(path)._stored


@pytest.mark.parametrize("kind", KINDS)
def test_the_record_and_every_export_have_what_stepped(kinds: StoredStudy, tmp_path: Path, kind: str) -> None:
    (tmp_path / "made.py").write_text(TASKS)
    optimizer = runpy.run_path(str(tmp_path / "made.py"))["MADE"][kind](
        [torch.nn.Parameter(torch.zeros(2))], 0.01
    )
    (group,) = optimizer.param_groups
    record = next(one for one in kinds.records if one.parameters["kind"] == kind)
    said = [name for name in ("weight_decay", "betas", "eps", "momentum", "nesterov") if name in group]
    document = trial_document(record, kinds.front)
    assert record.facts.optimizer == type(optimizer).__name__
    assert {name: document[name] for name in said} == {name: _listed(group[name]) for name in said}
    (stepped,) = record.facts.groups
    assert {name for name, value in group.items() if isinstance(value, bool | int | float)} <= stepped.keys()
    settings = chosen_settings(kinds, record, "it")
    mapping = yaml.safe_load(FRAMEWORKS["yaml"](settings).text)
    assert {name: mapping[name] for name in said} == {name: _listed(group[name]) for name in said}
    for framework in ("hf", "lightning", "accelerate", "deepspeed"):
        text = FRAMEWORKS[framework](settings).text
        if framework == "hf" and "adam_beta1" in text:  # as arguments of the Trainer
            beta1, beta2 = group["betas"]
            expected = {
                "adam_beta1": beta1,
                "adam_beta2": beta2,
                "adam_epsilon": group["eps"],
                "weight_decay": group["weight_decay"],
            }
        else:
            own = ("dampening", "amsgrad", "momentum_decay", "decoupled_weight_decay")
            usual = type(optimizer)([torch.nn.Parameter(torch.zeros(2))]).param_groups[0]
            changed = [name for name in own if name in group and group[name] != usual[name]]
            expected = {name: group[name] for name in (*said, *changed)}
        assert dict(_found(text, expected)) == expected, (framework, text)
    assert "tasks.py:Kinds" in FRAMEWORKS["pytorch"](settings).text  # it trains the study's own code


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _found(text: str, names: Any) -> Iterator[tuple[str, Any]]:
    for name in names:
        if found := re.search(rf"\b{name}['\"]?\s*[=:]\s*([^\s,\[({{}})\]]+|[\[(][^\])]*[\])])", text):
            value = yaml.safe_load(found[1].replace("(", "[").replace(")", "]"))
            yield (
                name,
                tuple(value)
                if isinstance(value, list)
                else float(value)
                if isinstance(value, str)
                else value,
            )


def test_two_groups_are_recorded_apart_and_told_where_a_format_has_one(tmp_path: Path) -> None:
    path = study(tmp_path, "Groups")
    assert not run(path).failure
    stored = bsearch.Study(path)._stored
    (record,) = stored.records
    # The larger one speaks for all.
    assert [group["weight_decay"] for group in record.facts.groups] == [
        0.1,
        0.0,
    ]
    assert record.settings["weight_decay"] == 0.1
    settings = chosen_settings(stored, record, "it")
    for framework in ("hf", "lightning", "accelerate", "deepspeed"):
        exported = FRAMEWORKS[framework](settings)
        assert any("had another group" in note and "weight_decay=0.0" in note for note in exported.notes)
    assert [
        group["weight_decay"] for group in yaml.safe_load(FRAMEWORKS["yaml"](settings).text)["groups"]
    ] == [0.1, 0.0]


@pytest.mark.slow
def test_a_setting_that_changes_in_training_is_told(tmp_path: Path) -> None:
    path = study(tmp_path, "Changes", training={"evaluations": 8, "accept_inexact": True})
    assert not run(path).failure
    stored = bsearch.Study(path)._stored
    (record,) = stored.records
    assert record.facts.momentum is None
    assert record.facts.groups[0]["momentum"] == "0.8 to 0.9"
    notes = FRAMEWORKS["lightning"](chosen_settings(stored, record, "it")).notes
    assert any("changed its settings in training (momentum 0.8 to 0.9)" in note for note in notes)


def test_a_loop_of_ones_own_is_read_alike(tmp_path: Path) -> None:
    path = study(tmp_path, "loop")
    assert not run(path).failure
    (record,) = bsearch.Study(path)._stored.records
    facts = record.facts
    assert (facts.optimizer, facts.weight_decay, facts.betas, facts.eps) == ("AdamW", 0.3, (0.8, 0.95), 1e-6)
    assert facts.groups[0]["lr"] == facts.learning_rate


@pytest.mark.slow
def test_check_tells_where_the_optimizer_differs_from_the_setup(tmp_path: Path) -> None:
    space = {"effective_batch": 32, "reference_rate": 0.01, "epochs": 1, "kind": "adamw"}
    said = CliRunner().invoke(main, ["check", str(study(tmp_path, "Kinds", space=space))]).output
    assert (
        "AdamW has its own weight_decay 0.3 (setup: 0.0), betas [0.8, 0.95] (setup: (0.9, 0.999)), eps 1e-06"
        in said
    )
