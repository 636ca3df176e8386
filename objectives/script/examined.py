"""What is examined of a script beside what is examined of every loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ...spaces.laws.examination import Examination, Finding
from ...spaces.plan import BatchPlan
from ..examination.causes import Cause, parts_cause
from ..loop import unserved
from ..machine.torch_settings import seed_everything

if TYPE_CHECKING:
    from ..profiling.loop_session import ExaminedLoop

# Steps of a short training, and passes in it.
_STEPS, _PASSES = 6, 3

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
    """Run a short training whose batches come in two parts, which raises what a trial would.

    Raises:
        TaskError: the script does once a batch what belongs to a step.
    """
    size = parts.setup.smallest_micro_batch
    short = replace(
        parts.setup,
        plan=BatchPlan(2 * size, 2),
        largest_micro_batch=size,
        samples_budget=_STEPS * 2 * size,
        epochs=_PASSES,
        checkpoint=None,
        model_folder=None,
    )
    seed_everything(short.seed)
    with unserved():
        for _ in parts.function(short):
            pass
    yield from ()
