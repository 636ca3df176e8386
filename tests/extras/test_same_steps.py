"""Exports of a language model train as the trial did: the same rows in the same steps, with the same losses.

Axolotl and LLaMA-Factory pin other versions of torch and transformers, so they run from environments of their own:
BSEARCH_AXOLOTL and BSEARCH_LLAMAFACTORY name their commands.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bsearch.objectives.language import CausalLM
from bsearch.objectives.training import TrainingRun
from bsearch.search.report.frameworks import FRAMEWORKS, ChosenSettings
from bsearch.spaces.learning_rate import OptimizerSettings
from bsearch.spaces.plan import BatchPlan
from objectives.chat import conversations, tokenizer, write_jsonl
from test_language_exports import LLAMA, language

pytestmark = [
    pytest.mark.frameworks,
    # Of transformers, about what peft reads there, and about names that version 4 needs.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
STEPS, BATCH = 20, 6


def settings_of(
    folder: Path, parameters: dict[str, Any], accumulation: int = 3, **training: Any
) -> ChosenSettings:
    """A trial of twenty steps and half a one, of more than one epoch, on conversations."""
    from transformers import LlamaConfig, LlamaForCausalLM

    options = {"text": "chat.jsonl", "length": 128, **parameters}
    made = language(
        folder,
        options,
        BatchPlan(BATCH, accumulation),
        **{"schedule": "constant", "warmup": 0, "seed": 11, **training},
    )
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**LLAMA, initializer_range=0.2)).save_pretrained(folder / "llama")
    tokenizer().save_pretrained(folder / "llama")
    write_jsonl(folder / "chat.jsonl", conversations(120))
    setup = replace(
        made.setup,
        device="cpu",
        optimizer=OptimizerSettings(3e-3, weight_decay=0.0),
        samples_budget=STEPS * BATCH + BATCH // 2,
        epochs=2,
    )
    return replace(made, setup=setup, even_settings=setup.optimizer)


def losses(settings: ChosenSettings) -> list[float]:
    """The mean loss of each of the trial's steps."""
    run = TrainingRun(CausalLM(), settings.setup)
    found = []
    for step in run.steps():
        found.append(float(run.step(step.micro_batches, step.samples)))
        if step.evaluates:
            run.measurement({})
    return found


def told(folder: Path) -> list[float]:
    """The losses that a Trainer's state has, step by step."""
    states = sorted(folder.rglob("trainer_state.json"), key=lambda path: path.stat().st_mtime)
    return [line["loss"] for line in json.loads(states[-1].read_text())["log_history"] if "loss" in line]


def exported(settings: ChosenSettings, framework: str, folder: Path) -> str:
    made = FRAMEWORKS[framework](settings)
    assert made.beside is not None
    made.beside(folder)
    return made.text


CASES: dict[str, dict[str, Any]] = {
    "packed": {"parameters": {}},
    "lone": {"parameters": {"packing": False}},
}
OURS: dict[str, dict[str, Any]] = {
    **CASES,
    "lora": {"parameters": {"lora_rank": 4}, "schedule": "cosine", "warmup": 0.2, "clip_norm": 0.5},
    "dora": {
        "parameters": {"lora_rank": 4, "lora_variant": "dora", "lora_trained": "lm_head"},
        "schedule": "linear",
    },
    "scratch": {"parameters": {"from_scratch": True}, "schedule": "wsd", "warmup": 0.1},
}


@pytest.mark.parametrize("case", OURS)
def test_trl_takes_the_steps_of_the_trial(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    settings = settings_of(tmp_path, **OURS[case])
    if "lora" in case:  # what is decayed is the same too
        settings = replace(settings, even_settings=replace(settings.even_settings, weight_decay=0.1))
        settings = replace(settings, setup=replace(settings.setup, optimizer=settings.even_settings))
    expected = losses(settings)
    (tmp_path / "train.py").write_text(exported(settings, "trl", tmp_path))
    names = runpy.run_path(str(tmp_path / "train.py"))
    names["arguments"].logging_steps = 1
    trainer = names["trainer"]()
    trainer.train()
    found = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(found) == STEPS + 1
    assert found == pytest.approx(expected, abs=1e-4)
    assert expected[0] - expected[-2] > 0.1  # it learns


def command(variable: str) -> str:
    found = os.environ.get(variable)
    if not found:
        pytest.skip(f"{variable} names no command")
    assert shutil.which(found) is not None
    return found


# Axolotl averages the means of micro-batches, which its text notes: without accumulation there is one.
@pytest.mark.parametrize(("framework", "accumulation"), [("axolotl", 1), ("llamafactory", 3)])
@pytest.mark.parametrize("case", CASES)
def test_other_libraries_take_the_steps_of_the_trial(
    framework: str, accumulation: int, case: str, tmp_path: Path
) -> None:
    line = command(f"BSEARCH_{framework.upper()}")
    settings = settings_of(tmp_path, accumulation=accumulation, **CASES[case])
    expected = losses(settings)
    logs = {"axolotl": f"save_steps: {STEPS}\nuse_tensorboard: false\n", "llamafactory": ""}[framework]
    (tmp_path / "config.yaml").write_text(
        f"{exported(settings, framework, tmp_path)}\nlogging_steps: 1\n{logs}"
    )
    ran(tmp_path, line, "train", "config.yaml")
    assert told(tmp_path / "output")[:STEPS] == pytest.approx(expected[:STEPS], abs=1e-4)


def ran(folder: Path, *line: str) -> None:
    path = f"{Path(line[0]).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {
        **os.environ,
        "PATH": path,
        "AXOLOTL_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]
