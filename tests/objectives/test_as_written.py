"""A library's own run against ours, of the same batches in the same order: hooks, rates, losses and weights."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason=".[lightning] is not installed")
pytest.importorskip("transformers", reason=".[huggingface] is not installed")

import lightning
import transformers
from bsearch.objectives.adapters import huggingface
from bsearch.objectives.adapters import lightning as adapter
from bsearch.objectives.data.batches import SampleStream
from bsearch.objectives.machine.torch_settings import seed_everything
from bsearch.spaces.errors import TaskError
from bsearch.spaces.trial import TrialSetup
from helpers import setup
from huggingface_tasks import Plain
from lightning_tasks import Module
from torch import nn
from torch.utils.data import DataLoader, Dataset
from trainer_contract import Points, Slow

pytestmark = pytest.mark.frameworks

# A line for each call of a hook: its owner and name, what it sees, and what the training is by then.
SEEN: list[tuple[Any, ...]] = []


def constant(**training: Any) -> TrialSetup:
    """Four steps of a whole epoch, one evaluation."""
    training = {"schedule": "constant", "warmup": 0, "evaluations": 1, **training}
    return setup(150, budget=600, training=training)


def batches(made: TrialSetup, points: Dataset[Any]) -> list[list[int]]:
    index = SampleStream(len(points), made.seed).take(0, 600).index.tolist()  # type: ignore[arg-type]
    return [index[start : start + 150] for start in range(0, 600, 150)]


def norm(tensors: Any) -> list[float]:
    return [float(tensor.detach().norm()) for tensor in tensors]


# Lightning. `configure_gradient_clipping` and its like are refused.

_MODULES = [
    *(
        name
        for name in dir(lightning.LightningModule)
        if name.startswith("on_") and callable(getattr(Module, name))
    ),
    *(
        "setup",
        "teardown",
        "configure_model",
        "prepare_data",
        "backward",
        "optimizer_zero_grad",
        "configure_optimizers",
    ),
    *("training_step", "validation_step", "transfer_batch_to_device", "configure_callbacks"),
]
_CALLBACKS = [
    name for name in dir(lightning.Callback) if name.startswith("on_") or name in ("setup", "teardown")
]


def recorded(kind: Any, names: list[str]) -> Any:
    def recording(name: str) -> Any:
        original = getattr(kind, name)

        @wraps(original)
        def hook(self: Any, *args: Any, **others: Any) -> Any:
            module = self if isinstance(self, nn.Module) else args[1] if len(args) > 1 else None
            trainer = None if module is None else module._trainer
            state: list[Any] = [
                kind.__name__,
                name,
                torch.is_grad_enabled(),
                torch.is_autocast_enabled("cpu"),
            ]
            if trainer is not None:
                optimizers = trainer.optimizers
                state += [trainer.global_step, trainer.current_epoch, module.training]
                state += [[group["lr"] for one in optimizers for group in one.param_groups]]
                state += [
                    norm(module.parameters()),
                    norm(one.grad for one in module.parameters() if one.grad is not None),
                ]
                if name == "on_before_backward":
                    state.append(float(args[-1].detach()))
                if name == "on_train_batch_end":
                    state.append({key: float(value) for key, value in args[-3].items()})
            SEEN.append(tuple(state))
            return original(self, *args, **others)

        return hook

    return type(kind.__name__, (kind,), {name: recording(name) for name in names})


class Changing(lightning.Callback):
    """Changes gradients where users do."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        next(pl_module.parameters()).grad.mul_(3)


RecordingModule, RecordingCallback = recorded(Module, _MODULES), recorded(Changing, _CALLBACKS)


def loaders(made: TrialSetup, **options: Any) -> tuple[Any, Any]:
    points = Points(dtype=torch.float32)
    return DataLoader(points, **options), DataLoader(Points(100, dtype=torch.float32), batch_size=100)


@pytest.mark.parametrize("training", [{}, {"clip_norm": 0.1}, {"precision": "bf16"}])
def test_lightning_runs_a_module_as_it_is_written(training: dict[str, Any]) -> None:
    made = constant(**training)
    seed_everything(made.seed)
    trainer = lightning.Trainer(
        **{
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        },
        **{"accelerator": "cpu", "devices": 1, "max_epochs": 1, "num_sanity_val_steps": 0},
        precision={"fp32": "32-true", "bf16": "bf16-mixed"}[made.training.precision],
        gradient_clip_val=made.training.clip_norm,
        callbacks=[RecordingCallback()],
    )
    module = RecordingModule(made, dtype=torch.float32)
    SEEN.clear()
    with adapter._quiet():
        trainer.fit(module, *loaders(made, batch_sampler=batches(made, Points())))
    expected, weights = SEEN.copy(), [*module.parameters()]
    SEEN.clear()
    seed_everything(made.seed)
    module = RecordingModule(made, dtype=torch.float32)
    [last] = adapter.train_with(
        made, module, data=loaders(made, shuffle=True), callbacks=[RecordingCallback()]
    )
    assert expected == SEEN
    assert all(map(torch.equal, module.parameters(), weights))
    assert last.scores["accuracy"] == float(trainer.callback_metrics["accuracy"])


def test_what_training_logs_is_of_the_interval_that_is_measured() -> None:
    class Logs(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("position", float(self.global_step), on_step=False, on_epoch=True, batch_size=1)
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            self.log("ended", float(self.global_step))

    made = constant(evaluations=2)
    first, last = adapter.train_with(made, Logs(made, dtype=torch.float32), data=loaders(made))
    assert [(one.scores["position"], one.scores["ended"]) for one in (first, last)] == [(0.5, 2), (2.5, 4)]


@pytest.mark.parametrize("kind", [Slow, torch.optim.LBFGS])
def test_an_optimizer_whose_step_a_library_would_take_wrongly_is_refused(kind: Any) -> None:
    made = constant()
    module = Module(
        made, lambda net, setup: kind(net.parameters(), lr=setup.learning_rate), dtype=torch.float32
    )
    net = Plain()
    with pytest.raises(TaskError, match="expected an optimizer "):
        if kind is torch.optim.LBFGS:
            list(adapter.train_with(made, module, data=loaders(made)))
        else:  # Accelerate loads its state, which gives it groups of its own
            optimizer = type("Detached", (Slow,), {"load_state_dict": torch.optim.Optimizer.load_state_dict})(
                net, made
            )
            list(
                huggingface.train_with(made, model=net, train_dataset=Points(), optimizers=(optimizer, None))
            )


class Keeping(Module):
    def optimizer_zero_grad(self, *_: Any) -> None:
        pass


def test_gradients_that_a_module_keeps_for_its_next_step_are_refused() -> None:
    made = constant()
    with pytest.raises(TaskError, match=r"Keeping\.optimizer_zero_grad: expected cleared gradients"):
        list(adapter.train_with(made, Keeping(made, dtype=torch.float32), data=loaders(made)))


def test_callbacks_without_a_place_in_a_trial_are_refused_in_our_words() -> None:
    kinds = lightning.pytorch.callbacks
    made, given = constant(), [kinds.ModelCheckpoint(), kinds.LearningRateMonitor(), kinds.WeightAveraging()]
    with pytest.raises(TaskError) as raised:
        list(adapter.train_with(made, Module(made), data=loaders(made), callbacks=given))
    assert str(raised.value).splitlines() == [
        "train_with: callbacks: expected no ModelCheckpoint, because the study keeps checkpoints; for a trained model write "
        "bsearch train --keep model",
        "train_with: callbacks: expected no WeightAveraging, because its averages are in no checkpoint; average weights in the "
        "module, as buffers",
        "train_with: callbacks: expected a logger for LearningRateMonitor, got none. Pass logger=, or remove it.",
    ]


# Hugging Face

_EVENTS = [name for name in dir(transformers.TrainerCallback) if name.startswith("on_")]


def _event(name: str) -> Any:
    def event(
        self: Any, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **more: Any
    ) -> None:
        counts = state.global_step, state.epoch, state.max_steps, state.num_train_epochs
        rates = [] if optimizer is None else [group["lr"] for group in optimizer.param_groups]
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        SEEN.append(
            (name, *counts, rates, torch.is_grad_enabled(), norm(model.parameters()), norm(gradients))
        )
        if name == "on_pre_optimizer_step":  # where users change gradients
            gradients[0].mul_(3)

    return event


Recorder: Any = type("Recorder", (transformers.TrainerCallback,), {name: _event(name) for name in _EVENTS})


class Recorded(transformers.Trainer):
    """Its own methods are called too."""

    batches: Any = None

    def get_train_dataloader(self) -> Any:
        if self.batches is None:
            return super().get_train_dataloader()
        return DataLoader(self.train_dataset, batch_sampler=self.batches, collate_fn=self.data_collator)  # type: ignore[arg-type]

    def training_step(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        loss = super().training_step(model, inputs, *args, **more)
        SEEN.append(
            ("training_step", sorted(inputs), float(loss), [str(one.dtype) for one in inputs.values()])
        )
        return loss

    def create_optimizer(self, *args: Any) -> Any:
        SEEN.append(("create_optimizer",))
        return super().create_optimizer(*args)

    def evaluate(self, *args: Any, **more: Any) -> Any:
        SEEN.append(("evaluate",))
        return super().evaluate(*args, **more)


@pytest.mark.parametrize("training", [{}, {"clip_norm": 0.1}, {"precision": "bf16"}])
def test_transformers_runs_a_trainer_as_it_is_written(training: dict[str, Any], tmp_path: Path) -> None:
    made = constant(**training)
    data = {"train_dataset": Points(dtype=torch.float32), "eval_dataset": Points(100, dtype=torch.float32)}
    given = huggingface._arguments(made, {}, 4) | {
        "eval_strategy": "steps",
        "eval_steps": 4,
        "lr_scheduler_type": "constant",
    }
    seed_everything(made.seed)
    args = transformers.TrainingArguments(output_dir=str(tmp_path), **given)
    net = Plain(torch.float32)
    own = type("Own", (Recorded,), {"batches": batches(made, data["train_dataset"])})(
        model=net, args=args, callbacks=[Recorder()], **data
    )
    own.remove_callback(transformers.PrinterCallback)
    SEEN.clear()
    own.train()
    expected = [one for one in SEEN if one[0] != "on_init_end"]
    SEEN.clear()
    seed_everything(made.seed)
    ours = Plain(torch.float32)
    list(huggingface.train_with(made, Recorded, model=ours, callbacks=[Recorder()], **data))
    assert [one for one in SEEN if one[0] != "on_init_end"] == expected
    assert all(map(torch.equal, ours.parameters(), net.parameters()))


class OwnScheduler(transformers.Trainer):
    step_loss = None

    def create_scheduler(self, *args: Any, **more: Any) -> Any:
        return super().create_scheduler(*args, **more)


def test_what_a_trial_replaces_in_a_trainer_is_refused_by_name() -> None:
    with pytest.raises(TaskError) as raised:
        list(huggingface.train_with(constant(), OwnScheduler, model=Plain()))
    assert str(raised.value).splitlines() == [
        "OwnScheduler.create_scheduler: expected the Trainer's, since training.schedule sets the rate; got an override. Remove "
        "it; for a schedule of your own write training.schedule: module:function.",
        "OwnScheduler.step_loss: expected another name, since a trial's Trainer has one of this name. Rename it.",
    ]


class Translations(Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = torch.arange(4) % (3 + index % 5) + 3
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words.flip(0)}


@pytest.mark.parametrize("generates", [False, True])
def test_a_trainer_of_sequences_is_trained_and_generates(generates: bool) -> None:
    torch.manual_seed(0)
    small = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=12, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, **small
        )
    )
    dimensions: list[int] = []

    def metrics(evaluation: Any) -> dict[str, float]:
        dimensions.append((evaluation.predictions if generates else evaluation.predictions[0]).ndim)
        return {"accuracy": 0.5}

    made = setup(8, 2, budget=24, training={"evaluations": 1})
    [last] = huggingface.train_with(
        made,
        transformers.Seq2SeqTrainer,
        arguments={"predict_with_generate": True, "generation_max_length": 7} if generates else {},
        model=model,
        train_dataset=Translations(),
        eval_dataset=Translations(),
        compute_metrics=metrics,
        optimizers=(torch.optim.SGD(model.parameters(), lr=made.learning_rate), None),
    )
    assert dimensions == [2 if generates else 3]  # words, or logits
    assert last.scores["loss"] > 0
