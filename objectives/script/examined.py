"""What is examined of a script beside what is examined of every loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ...spaces.laws.examination import Examination, Finding
from ...spaces.plan import BatchPlan
from ..engine import served
from ..examination.causes import Cause, parts_cause
from ..machine.torch_settings import seed_everything

if TYPE_CHECKING:
    from ..profiling.loop_probes import ExaminedLoop

# Steps of a short training, and passes in it.
_STEPS, _PASSES = 6, 3
# A rate that leaves weights as they are; and the relative difference of scores, of which statistics of BatchNorm explain less.
_STILL, _APART = 1e-30, 0.4

# For what holds of whole batches alone.
_WHOLE = "write splits=False, and batches come whole, up to the largest that fits."


def script_cause(layer: str) -> Cause:
    """The cause of a difference between a script's step and its parts."""
    cause = parts_cause(layer)
    if layer:
        return cause
    return Cause(
        cause.kind,
        "expected parts whose gradients add up to that of the whole step, got parts that do not. If the loss is a sum over the "
        "batch's samples, write loss='sum'. A loss that compares samples, divides by what it counts in a batch, or is "
        f"back-propagated after another optimizer's step, cannot be split: {_WHOLE}",
    )


# What to do about a difference between two lives of a script, in the place of what a task's author would do.
_INSTEAD = {
    "resumed": (" Keep it as a buffer", " Write resumes=False, and a trial that is interrupted begins anew."),
    "averaged": (" What averages it", " It may be an average over batches, or over earlier passes too."),
}


def in_script_words(examination: Examination) -> Examination:
    """An examination whose findings say what a script's user can do."""

    def told(finding: Finding) -> Finding:
        if finding.kind not in _INSTEAD:
            return finding
        beginning, instead = _INSTEAD[finding.kind]
        return replace(finding, message=finding.message.partition(beginning)[0] + instead)

    return replace(examination, findings=tuple(map(told, examination.findings)))


def trained_in_parts(parts: ExaminedLoop) -> Iterator[Finding]:
    """Run a short training whose batches come in two parts, which raises what a trial would; and again with half the batch.

    At a rate that leaves the weights as they are, both have the same score: one that is divided by the batch that the script is
    told has not, since a loader that evaluates keeps its own.

    Raises:
        TaskError: the script does once a batch what belongs to a step.
    """
    size = parts.setup.smallest_micro_batch
    short = replace(
        parts.setup,
        optimizer=replace(parts.setup.optimizer, learning_rate=_STILL),
        largest_micro_batch=size,
        samples_budget=_STEPS * 2 * size,
        epochs=_PASSES,
        checkpoint=None,
        model_folder=None,
    )
    scores = list[float]()
    for plan in BatchPlan(2 * size, 2), BatchPlan(size):
        seed_everything(short.seed)
        with served(None):
            *_, last = parts.function(replace(short, plan=plan))
        scores.append(last.value(short.metric))
    if abs(scores[0] - scores[1]) > _APART * max(map(abs, scores)):
        yield Finding(
            "averaged",
            parts.function.__name__,
            f"{short.metric} depends on the batch that it is told: {scores[0]:.4g} at {2 * size}, {scores[1]:.4g} at {size}, "
            "of the same weights. A loader that evaluates keeps its own batch: divide by what it gives, not by the batch told.",
        )
