"""A task's first step: whether its code works, keeps its contract, and with how few samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from ...spaces.errors import BsearchError, TaskError
from ...spaces.laws.device import DeviceProfile
from ...spaces.learning_rate import BESIDE_RATE
from ...spaces.trial import Parameter, TrialSetup
from ..loading import contained, described, user_code_location
from ..model.batch_norm import batch_norms
from ..optimizers import decouples_decay, group_settings, has_adams_betas, main_first, shown_kind
from ..task import Task, TrainFunction
from .held import Held
from .memory.live_bytes import LiveBytes


class ParameterNotFound(KeyError):
    """A task reads a parameter that its study does not define."""

    def __init__(self, name: str, known: Collection[str]) -> None:
        super().__init__(name)
        self.known = sorted(known)

    def __str__(self) -> str:
        defined = ", ".join(self.known) or "none"
        expected = f"expected a parameter of the study ({defined})"
        return f"setup.parameters: {expected}, got {self.args[0]!r}. Add it under space: in study.yaml."


class ReadParameters(dict[str, Parameter]):
    """The study's own parameters, which records the ones that the task reads."""

    def __init__(self, values: Mapping[str, Parameter]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __missing__(self, name: str) -> Parameter:
        raise ParameterNotFound(name, self.keys())

    def __getitem__(self, name: str) -> Parameter:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:
        self.read.update(self.keys())
        return super().__iter__()


@contextmanager
def user_code_errors(reference: str, activity: str) -> Iterator[None]:
    """Turn any error from the user's code into a TaskError that names its line."""
    try:
        with contained():
            yield
    except TaskError as error:
        place = user_code_location(error)
        if not place or place in str(error):
            raise
        raise TaskError(f"{error}{place}") from error
    except BsearchError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(f"task {reference}: {activity} failed: {described(error)}") from error


def on_cpu(setup: TrialSetup) -> TrialSetup:
    """The setup on a CPU, without a limit: with the precision of as many bytes, where a CPU does not have its own."""
    precision = "fp32" if setup.training.precision == "tf32" else setup.training.precision
    training = setup.training.model_copy(update={"precision": precision})
    return replace(setup, device="cpu", training=training, memory_limit_bytes=None)


def smallest_workable(
    training: Task | TrainFunction, setup: TrialSetup, look: Callable[[Any], object] = lambda engine: None
) -> tuple[int, Any]:
    """The smallest micro-batch: 1, or 2 where the model rejects a single sample (batch statistics need two values).

    Args:
        look: called with the engine of the new model, before its first step.

    Returns:
        The size, and the engine after a step at a learning rate of zero.
    """
    first_error: Exception | None = None
    for samples in (1, 2):
        plan = replace(setup.plan, effective_batch=samples)
        with closing(Held(training, replace(setup, plan=plan))) as held:
            engine = held.engine
            if samples > engine.data.training_set:
                break
            look(engine)
            # In a trial the bytes of the first steps are counted.
            counted = LiveBytes(setup.memory_limit_bytes).counting(
                engine.model, engine.optimizer, engine.averages
            )
            contexts = [counted] if engine.device.type == "cpu" else []
            try:
                held.step(engine.micro_batches(plan, engine.loader([plan])), samples, contexts)
            except (ValueError, RuntimeError) as error:
                first_error = first_error or error
                continue
            if math.isfinite(loss := float(engine.course.losses)):
                return samples, engine
            # A single sample may make the loss undefined, such as a contrastive one or a variance: try more.
            first_error = first_error or TaskError(
                f"{type(training).__name__}.loss: expected a finite loss from the new model's first batch, got {loss}. "
                "Check the data's values and the loss."
            )
    assert first_error is not None
    raise first_error


def with_facts_of(profile: DeviceProfile, run: Any, smallest: int) -> DeviceProfile:
    """The profile with what its run shows of the data, the optimizer and the model."""
    main = main_first(group_settings(run.optimizer), run.setup.weight_decay)[0]
    ours = asdict(run.setup.optimizer)
    others = [name for name in BESIDE_RATE if name in main and not _alike(main[name], ours[name])]
    return replace(
        profile,
        training_set=run.data.training_set,
        smallest_micro_batch=smallest,
        unit="" if run.data.lengths is None else run.data.unit,
        units_per_sample=None
        if run.data.lengths is None
        else float(np.average(run.data.lengths, weights=run.data.weights)),
        optimizer=shown_kind(run.optimizer),
        own_settings=", ".join(f"{name} {main[name]} (setup: {ours[name]})" for name in others),
        adaptive=has_adams_betas(run.optimizer),
        decoupled_decay=decouples_decay(run.optimizer),
        applies_decay=any(
            math.isclose(float(group.get("weight_decay", 0.0)), run.setup.weight_decay)
            for group in run.optimizer.param_groups
        ),
        applies_betas=any(
            all(map(math.isclose, group["betas"], run.setup.betas))
            for group in run.optimizer.param_groups
            if "betas" in group
        ),
        batch_statistics=any(True for _ in batch_norms(run.model)),
        model_parameters=sum(parameter.numel() for parameter in run.parameters),
        gradient_bytes=sum(parameter.numel() * parameter.element_size() for parameter in run.parameters),
    )


def _alike(value: Any, other: Any) -> bool:
    return bool(np.shape(value) == np.shape(other) and np.allclose(value, other, rtol=1e-6, atol=0.0))
