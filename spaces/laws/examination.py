"""What the comparison of one training step, unsplit and split, found, as values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

# Refused: the gradient of a split step, or a score, differs by more than rounding, or a run would not repeat.
#   mean         a mean over the batch where a sum was expected
#   denominator  the denominators of parts do not add up to that of the whole
#   weights      a mean whose own denominator (class weights, counted tokens) is not the one that was returned
#   coupled      the loss compares the samples of a batch
#   layer        a layer of the model mixes them
#   state        the loss changes parameters, once per micro-batch
#   stale        a step's gradient holds that of the step before
#   plan         the code computes something from setup.plan that the step already has
#   beside       a tensor that no model holds gets a gradient
#   unstepped    a parameter gets a gradient, and no optimizer has it
#   recomputed   a block that is recomputed in the backward pass has another gradient
#   evaluation   evaluating changes the training
#   shared       weights that an earlier call of the same function has returned
#   resumed      a training that is saved and resumed ends otherwise
#   generator    training data with a random generator that the trial's seed does not reach
#   made_by_model  training data made by the model that is being trained
#   score        a score that is not a ratio of sums
#   packing      documents of a packed row that are not computed as they are alone
#   causal       a language model whose tokens see those that follow
# Reported only: the training is unchanged, or the difference is expected.
#   batch_norm           BatchNorm normalises over the micro-batch
#   random               random draws: exact with the draws held fixed
#   buffers              buffers other than BatchNorm's are updated once per micro-batch
#   eval_mode            modules that the task has put in evaluation mode, and that stay in it
#   unstable_validation  validation data that differ when they are read again
#   scores_not_compared  scores could not be compared
#   averaged     a metric that depends on how many samples are evaluated at a time
#   unexamined           what could not be compared besides
#   rows         how rows of documents are made
Kind = Literal[
    "mean",
    "denominator",
    "weights",
    "coupled",
    "layer",
    "state",
    "stale",
    "plan",
    "beside",
    "unstepped",
    "recomputed",
    "evaluation",
    "resumed",
    "shared",
    "generator",
    "made_by_model",
    "score",
    "batch_norm",
    "random",
    "buffers",
    "eval_mode",
    "unstable_validation",
    "scores_not_compared",
    "averaged",
    "unexamined",
    "packing",
    "causal",
    "rows",
]
REFUSED: frozenset[Kind] = frozenset(
    (
        *(
            "mean",
            "denominator",
            "weights",
            "coupled",
            "layer",
            "state",
            "generator",
            "score",
            "packing",
            "causal",
        ),
        *(
            "stale",
            "plan",
            "beside",
            "unstepped",
            "recomputed",
            "evaluation",
            "resumed",
            "shared",
            "made_by_model",
        ),
    )
)

Verdict = Literal["exact", "unsplit", "inexact", "not examined"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that the examination found.

    Args:
        where: the user's method or data, such as `Digits.loss`.
        message: what was compared, by how much it differs, and what to write instead.
        difference: relative difference between unsplit and split; None where nothing was compared.
    """

    kind: Kind
    where: str
    message: str
    difference: float | None = None

    @property
    def refused(self) -> bool:
        """Whether a study needs `training.accept_inexact` to go on."""
        return self.kind in REFUSED

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


@dataclass(frozen=True, slots=True)
class Examination:
    """The comparison of one real training step, unsplit and in several uneven splits, and of its scores.

    Args:
        samples: in the compared step.
        splits: number of random splits; 0 if batches are never split.
        precision: of the comparison, such as float64.
        difference: largest relative difference between the gradients of a split step and of the unsplit one.
        couples_samples: the task declares that its loss compares samples, or takes steps itself, so batches are never split.
        takes_steps: it takes them itself.
        seconds: duration of the examination.
        note: why no step was compared; empty if one was.
    """

    samples: int = 0
    splits: int = 0
    precision: str = ""
    difference: float = 0.0
    couples_samples: bool = False
    takes_steps: bool = False
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
        go_on = "To run the study anyway, set training: {accept_inexact: true}; its front then says so."
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
        return "unsplit" if self.couples_samples else "exact"

    @property
    def lines(self) -> list[str]:
        """The sentence, and each finding in a line."""
        return [self.sentence, *(f"- {finding}" for finding in self.findings)]

    @property
    def sentence(self) -> str:
        """The verdict, with what it rests on.

        >>> Examination(24, 3, "float64", difference=2e-16).sentence
        'examined: a step of 24 samples has the same gradient unsplit and in 3 uneven splits (largest relative difference 2e-16, in float64)'
        """  # noqa: E501
        if self.refusals:
            off = max((finding.difference or 0.0 for finding in self.refusals), default=0.0)
            where = ", ".join(dict.fromkeys(finding.where for finding in self.refusals))
            return f"examined: inexact ({where}" + (f"; relative difference {off:.2g})" if off else ")")
        if self.note:
            return f"not examined: {self.note}"
        if self.takes_steps:
            return "batches are never split: the training code takes its own optimizer steps (manual optimization)"
        if self.couples_samples:
            return "batches are never split, as the training code says (couples_samples, or splits=False of a script)"
        splits = "an uneven split" if self.splits == 1 else f"{self.splits} uneven splits"
        return (
            f"examined: a step of {self.samples} samples has the same gradient unsplit and in {splits} (largest relative "
            f"difference {self.difference:.1g}, in {self.precision})"
        )


def overall(examinations: Iterable[Examination | None]) -> Examination | None:
    """The least exact of several examinations, such as those of several models; None if there are none."""
    order = ("exact", "unsplit", "not examined", "inexact")
    known = [examination for examination in examinations if examination is not None]
    return max(
        known,
        key=lambda examination: (order.index(examination.verdict), examination.difference),
        default=None,
    )
