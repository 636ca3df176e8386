"""What follows from an attempt's end, as a value: the table of outcomes in docs/faults.md."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ....spaces.trial import LEFT, NODE_DIED, Outcome, TrialSetup
from .attempt import Attempt

# This many equal errors in a row are the task's fault, not the trial's.
SAME_ERRORS = 3
_NUMBERS = re.compile(r"(?P<code>with code -?\d+)|0x[0-9a-f]+|(?<!\w)/\S+|\d+(\.\d+)?(e[-+]?\d+)?")
# A trial whose worker dies this often without progress in between is itself the cause.
LOST_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class History:
    """What the end of an attempt is judged by.

    Args:
        reached: the most samples that any lost attempt of the trial had seen.
        lost: attempts lost since then without getting any further.
        error: the error that the last trials to end have in common; empty if the last one did not fail.
        errors: how many trials in a row have failed with it.
        failed: trials of the study that have failed so far.
        budget: `budget.trials`.
    """

    reached: int = 0
    lost: int = 0
    error: str = ""
    errors: int = 0
    failed: int = 0
    budget: int = 1

    def after_loss(self, attempt: Attempt, outcome: Outcome) -> History:
        """This history, updated for an interrupted attempt; deaths of a whole machine do not count."""
        seen = attempt.last.samples_seen if attempt.last else 0
        alone = int(outcome.message != LEFT and not outcome.message.startswith(NODE_DIED))
        if outcome.message == LEFT:
            return self
        return replace(
            self, reached=max(seen, self.reached), lost=alone if seen > self.reached else self.lost + alone
        )

    def after_end(self, outcome: Outcome) -> History:
        """This history, updated for a trial that has ended."""
        if outcome.kind != "error":
            return replace(self, error="", errors=0)
        # Errors that differ only in numbers (a batch, a rate), addresses and paths are the same error; exit codes tell apart.
        pattern = _NUMBERS.sub(lambda found: found["code"] or "#", outcome.message)
        return replace(
            self,
            error=pattern,
            errors=self.errors + 1 if pattern == self.error else 1,
            failed=self.failed + 1,
        )


@dataclass(frozen=True, slots=True)
class Retry:
    """The trial goes on with another attempt, with this setup; `words` for the user, empty where none are needed."""

    setup: TrialSetup
    words: str = ""


@dataclass(frozen=True, slots=True)
class Done:
    """The trial has ended."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Failed(Done):
    """The trial has ended, and the study cannot go on."""

    why: str


def after(
    attempt: Attempt, outcome: Outcome, history: History, smaller: TrialSetup | None = None
) -> Retry | Done | Failed:
    """What follows from an attempt's end.

    Args:
        history: before it.
        smaller: after an out-of-memory error, a setup of the same experiment that needs less; None if there is none.
    """
    number = attempt.setup.number
    match outcome.kind:
        case "interrupted":
            if outcome.message == LEFT or history.after_loss(attempt, outcome).lost < LOST_ATTEMPTS:
                words = "" if outcome.message == LEFT else f"trial {number}: interrupted: {outcome.message}"
                return Retry(replace(attempt.setup, attempt=attempt.setup.attempt + 1), words)
            outcome = Outcome("error", f"its worker died {LOST_ATTEMPTS} times in a row: {outcome.message}")
        case "out_of_memory":
            if smaller is not None:
                words = f"trial {number}: out of memory: {outcome.message}"
                return Retry(replace(smaller, attempt=attempt.setup.attempt + 1), words)
            outcome = Outcome(
                "error", f"a micro-batch of one sample does not fit: {outcome.message}", outcome.traceback
            )
    now = history.after_end(outcome)
    if now.errors >= SAME_ERRORS:
        return Failed(outcome, f"{SAME_ERRORS} trials in a row failed with the same error: {outcome.message}")
    if now.errors and now.failed > now.budget + SAME_ERRORS:
        return Failed(
            outcome,
            f"{now.failed} trials failed, more than budget.trials allows; the last: {outcome.message}",
        )
    return Done(outcome)
