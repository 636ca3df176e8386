"""What a comparison of one step, whole and split, says of a training: the examination's findings, as values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

# A gradient that differs by more than rounding, and why:
#   mean         a mean over the batch where a sum was expected
#   denominator  the denominators of parts do not add up to that of the whole
#   weights      a mean whose own denominator (class weights, counted tokens) is not the one that was returned
#   coupled      the samples of a batch see each other in the loss
#   layer        they see each other in a layer of the model
#   state        the loss changes parameters, once for each micro-batch
#   generator    training data read with a random generator that the trial's seed does not reach
#   score        a score that is not a quotient of sums
# What does not change the training, or is known to and told:
#   batch_norm   BatchNorm sees the micro-batch
#   random       the loss draws random numbers: exact for given ones
#   buffers      buffers beside BatchNorm's are updated once for each micro-batch
#   evaluating   modules that the task has put in evaluation mode, and that stay there
#   rereading    validation data that differ when they are read again
#   unscored     scores that could not be compared
Kind = Literal[
    "mean",
    "denominator",
    "weights",
    "coupled",
    "layer",
    "state",
    "generator",
    "score",
    "batch_norm",
    "random",
    "buffers",
    "evaluating",
    "rereading",
    "unscored",
]
REFUSED: frozenset[Kind] = frozenset({"mean", "denominator", "weights", "coupled", "layer", "state", "generator", "score"})

Verdict = Literal["exact", "whole", "inexact", "not examined"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that the examination found.

    Args:
        where: the user's method or data, such as `Digits.loss`.
        message: what was compared, by how much it differs, and what to write instead.
        off: relative difference between whole and split; None where nothing was compared.
    """

    kind: Kind
    where: str
    message: str
    off: float | None = None

    @property
    def refused(self) -> bool:
        """Whether a study needs `training.accept_inexact` to go on."""
        return self.kind in REFUSED

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


@dataclass(frozen=True, slots=True)
class Examination:
    """One real step of a training, taken whole and in several uneven splits, and its scores likewise.

    Args:
        samples: of the step that was compared.
        splits: how many ways it was split; 0 where the batch is never split.
        precision: that the step was compared in, such as float64.
        off: the largest relative difference between the gradient of a split step and that of the whole one.
        tolerance: what counts as rounding: it is measured, by the same step with its samples in another order.
        couples_samples: the task says that its loss compares samples, so that batches are never split.
        seconds: that the examination took.
        note: why no step was compared; empty where one was.
    """

    samples: int = 0
    splits: int = 0
    precision: str = ""
    off: float = 0.0
    tolerance: float = 0.0
    couples_samples: bool = False
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0
    note: str = ""

    @property
    def refusals(self) -> tuple[Finding, ...]:
        """The findings that need `training.accept_inexact`."""
        return tuple(finding for finding in self.findings if finding.refused)

    @property
    def refusal_lines(self) -> list[str]:
        """Each of them in a line, and how to go on all the same; none where nothing is refused."""
        go_on = "To run the study all the same, write training: {accept_inexact: true}; its front then says so."
        return [*map(str, self.refusals), go_on] if self.refusals else []

    @property
    def verdict(self) -> Verdict:
        """In a word or two.

        >>> Examination(24, 3, "float64").verdict, Examination(note="the data cannot be read").verdict
        ('exact', 'not examined')
        """
        if self.refusals:
            return "inexact"
        if self.note:
            return "not examined"
        return "whole" if self.couples_samples else "exact"

    @property
    def sentence(self) -> str:
        """The verdict, with what it rests on.

        >>> Examination(24, 3, "float64", off=2e-15, tolerance=1e-9).sentence
        'examined: a step of 24 samples equals its 3 uneven splits (largest difference 2e-15 of the gradient, in float64)'
        """
        if self.note:
            return f"not examined: {self.note}"
        if self.couples_samples:
            return "examined: the loss compares the samples of a batch, so a batch is never split"
        if self.refusals:
            off = max((finding.off or 0.0 for finding in self.refusals), default=0.0)
            where = ", ".join(dict.fromkeys(finding.where for finding in self.refusals))
            return f"examined: inexact ({where}" + (f"; off by {off:.2g})" if off else ")")
        return (
            f"examined: a step of {self.samples} samples equals its {self.splits} uneven splits (largest difference "
            f"{self.off:.1g} of the gradient, in {self.precision})"
        )


def overall(examinations: Iterable[Examination | None]) -> Examination | None:
    """Of several, as of several models: the one that is furthest from exact; None where nothing was examined."""
    order = ("exact", "whole", "not examined", "inexact")
    known = [one for one in examinations if one is not None]
    return max(known, key=lambda one: (order.index(one.verdict), one.off), default=None)
