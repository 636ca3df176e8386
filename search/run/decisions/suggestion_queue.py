"""Suggestions made ahead of when they are needed, in a thread of their own.

A fit of the models takes as long as the shortest trials, so free devices would wait for it. One fit therefore serves all free
devices, and as many more as trials are expected to end meanwhile; each suggestion is made given those before at their
predicted outcomes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

from ....spaces.record import TrialRecord
from ...suggest.suggester import Proposal, Suggester

# One fit makes one more for every so many running trials, rounded: the models then lack a few more outcomes besides the
# many that they lack anyway, and one fit serves them all.
_RUNNING_FOR_ONE_MORE = 16
# The most that are made for free devices by one fit: they wait until all are made.
_MOST_FREE = 64
# Suggestions may have to last for this many times the seconds that making them took.
_LASTS = 2.0


def from_one_fit(running: int) -> int:
    """How many suggestions are made ahead by one fit beside so many running trials.

    >>> [from_one_fit(running) for running in (1, 7, 8, 23, 24, 64)]
    [1, 1, 2, 2, 3, 5]
    """
    return 1 + (running + _RUNNING_FOR_ONE_MORE // 2) // _RUNNING_FOR_ONE_MORE


class SuggestionQueue:
    """What runners' free devices are given next.

    Args:
        trials: the study's, as they are now.
        ending: how many running trials are expected to end within so many seconds.

    Attributes:
        asks, asks_s: suggestions that were made, and the seconds that it took.
    """

    def __init__(
        self, suggester: Suggester, trials: Sequence[TrialRecord], ending: Callable[[float], int]
    ) -> None:
        self._suggester, self._trials, self._ending = suggester, trials, ending
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bsearch-ask", initializer=_yield_to_trials)
        self._preparing: Future[None] | None = None
        self._ready: deque[Proposal] = deque()
        self._took_s, self._soon = 0.0, 0  # the last time, and how many trials were to end before the next
        self.asks, self.asks_s = 0, 0.0

    def __len__(self) -> int:
        """Suggestions that are ready."""
        return len(self._ready)

    def submit(self, call: Callable[..., Any], *arguments: Any) -> None:
        """Call a function in the thread, between suggestions."""
        self._thread.submit(call, *arguments)

    def close(self) -> None:
        self._thread.shutdown()

    def take(self, running: int, free: int = 1, *, most: int) -> Proposal | Literal["wait"] | None:
        """The next suggestion; "wait" while it is being made; None where there is none.

        Args:
            running: trials; while there are any, the caller need not wait for a suggestion.
            free: how many the caller would take now, this one included.
            most: how many may be wanted, this one included.
        """
        while True:
            self._check()
            if not self._ready:
                self._prepare(running, free, most)
                assert self._preparing is not None
                if running and not self._preparing.done():
                    return "wait"
                self._preparing.result()
                self._check()
                if not self._ready:
                    return None
            proposal = self._ready.popleft()
            # It may have been resumed since.
            if not isinstance(proposal, int) or self._trials[proposal].is_paused:
                break
        if most > 1 and len(self._ready) < self._soon:
            self._prepare(running, free - 1, most - 1)
        return proposal

    def _prepare(self, running: int, free: int, most: int) -> None:
        if self._preparing is None:
            wanted = max(min(free, _MOST_FREE), from_one_fit(running))
            self._preparing = self._thread.submit(self._make, wanted, most)

    def _check(self) -> None:
        """Raise what went wrong in the thread."""
        if self._preparing is not None and self._preparing.done():
            done, self._preparing = self._preparing, None
            done.result()

    def _make(self, wanted: int, most: int) -> None:
        started = time.perf_counter()
        self._soon = self._ending(_LASTS * self._took_s)
        ready = [proposal for proposal in list(self._ready) if not isinstance(proposal, int)]
        made = self._suggester.suggest(self._trials, min(wanted + self._soon, most), ready=ready)
        self._ready.extend(made)
        self._took_s = time.perf_counter() - started
        self.asks, self.asks_s = self.asks + len(made), self.asks_s + self._took_s


def _yield_to_trials() -> None:
    """Let trials on this machine go before this thread, whose suggestions are made ahead of when they are needed."""
    if sys.platform != "linux":
        return  # elsewhere threads have no niceness of their own
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + 5)
