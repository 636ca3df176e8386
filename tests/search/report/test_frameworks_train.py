"""One trial's settings in other frameworks: they train so."""

from __future__ import annotations

import ast
import json
import math
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from bsearch.search.report.frameworks import FRAMEWORKS
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.schedule import rate_factor
from exported_settings import chosen, program, rates
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

PROGRAMS = ["hf", "lightning", "accelerate", "pytorch"]
EVEN = ["hf", "lightning", "accelerate", "deepspeed"]


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

    def test_trainer(
        self, plan: BatchPlan, samples: int, sizes: list[int], optimizer: str, tmp_path: Path
    ) -> None:
        transformers = pytest.importorskip("transformers")
        settings = chosen(plan, facts={"optimizer": optimizer}, schedule="linear", warmup=0.25)
        os.environ["WANDB_DISABLED"] = "true"
        script = program(settings, "hf")
        arguments = script["arguments"]
        assert (
            arguments.train_batch_size * arguments.gradient_accumulation_steps
            == settings.even.effective_batch
        )
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

    def test_trainers_wsd_is_ours(
        self, plan: BatchPlan, samples: int, sizes: list[int], optimizer: str
    ) -> None:
        transformers = pytest.importorskip("transformers")
        settings = chosen(
            plan, facts={"optimizer": optimizer}, budget=samples * 50, epochs=50, schedule="wsd", warmup=0.25
        )
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

    def test_lightning(
        self, plan: BatchPlan, samples: int, sizes: list[int], optimizer: str, tmp_path: Path
    ) -> None:
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
            assert [rate for _, rate in found] == pytest.approx(
                rates(settings, sizes, settings.setup.learning_rate), rel=1e-9
            )

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
            assert [rate for _, rate in found] == pytest.approx(
                rates(settings, sizes, settings.setup.learning_rate), rel=1e-9
            )


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
@pytest.mark.parametrize(
    "framework",
    [pytest.param(one, marks=pytest.mark.long) if one == "accelerate" else one for one in TWO_DEVICES],
)
@pytest.mark.long
def test_on_two_devices_each_sees_half_of_the_batch(framework: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers" if framework == "hf" else "accelerate")
    settings = chosen(BatchPlan(32, 2, 2), budget=260)
    watched = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parents[2])!r}, {str(Path(__file__).parent)!r}]
from test_frameworks_train import Counts, Rows, register_optimizer_step_post_hook
found, model = [], Counts()
{TWO_DEVICES[framework]}
import os, pathlib, torch
pathlib.Path(os.environ["RANK"] + ".txt").write_text(repr(found))
torch.distributed.barrier()
os._exit(0)  # gloo's threads may abort a process while it ends, even after destroy_process_group
"""
    (tmp_path / "train.py").write_text(FRAMEWORKS[framework](settings).text + watched)
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "train.py",
    ]
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
    made = getattr(
        torch.optim, {"adam": "Adam", "adamw": "AdamW"}.get(read.optimizer_name, read.optimizer_name)
    )(Counts().parameters(), **keywords)
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
        assert rate == pytest.approx(
            ours, abs=1e-9 * peak if training.schedule != "cosine" else 1.01 * slope * peak
        )


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_deepspeeds_product_rule_holds(devices: int) -> None:
    for batch, micro_batches in product(range(devices, 80), (1, 2, 3)):
        document = json.loads(
            FRAMEWORKS["deepspeed"](chosen(BatchPlan(batch, min(micro_batches, batch), devices))).text
        )
        product_of = (
            document["train_micro_batch_size_per_gpu"] * document["gradient_accumulation_steps"] * devices
        )
        assert document["train_batch_size"] == product_of
