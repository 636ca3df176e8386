"""The attempts of this run of a study on the clock: those that train, and the latest that have ended."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from ..view import span_of
from .attempt import Attempt
from .eta import ClockFactors, Span

# The latest attempts, from which the remaining time is estimated.
_LATEST = 500


class RunningAttempts(dict[int, Attempt]):
    """Attempts that train, by their trial's number; other threads may ask meanwhile.

    Args:
        expected_s: what an attempt's training is expected to take where it runs; None where that is not known.

    Attributes:
        ended: the latest attempts that ended in this run.
    """

    def __init__(self, expected_s: Callable[[Attempt], float | None]) -> None:
        super().__init__()
        self._expected_s = expected_s
        self.ended: deque[Span] = deque(maxlen=_LATEST)

    @property
    def train(self) -> bool:
        """Whether some attempt has its devices."""
        return any(attempt.held_since is not None for attempt in list(self.values()))

    def span(self, attempt: Attempt, ended_s: float | None = None, counts: float = 1.0) -> Span:
        """An attempt on the clock."""
        return span_of(
            attempt.setup, attempt.last, self._expected_s(attempt), attempt.started_s, ended_s, counts=counts
        )

    def end(self, number: int, *, counts: bool) -> Attempt:
        """An attempt has ended, and counts towards the budget or does not."""
        attempt = self.pop(number)
        self.ended.append(self.span(attempt, time.monotonic(), float(counts)))
        return attempt

    def spans(self) -> list[Span]:
        """The latest attempts, running ones too."""
        return [*self.ended, *map(self.span, list(self.values()))]

    def ending(self, seconds: float) -> int:
        """How many are expected to end within this time."""
        now_s, factors = time.monotonic(), ClockFactors.of(list(self.ended))
        left = (factors.left_s(self.span(attempt), now_s) for attempt in list(self.values()))
        return sum(left_s is not None and left_s <= seconds for left_s in left)
