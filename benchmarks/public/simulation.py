"""Trainings that cost nothing, on simulated workers: what of them has ended when."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from problems import FRACTIONS, WORKERS, Problem
from searchers import LimitError, PeerError, Searcher

Clock = Literal["trials", "seconds"]
_EPSILON = 1e-9  # tenths of trainings are added up


@dataclass
class Run:
    """What a search did.

    Args:
        ends: of the trainings that reached their end: when, in trainings, and their true seconds and accuracy.
        reached: trainings, or their mean time, that have passed.
        cut: why it did not reach its end: "" (it did), "limit N s" (of wall-clock time), or what a peer that failed said.
    """

    ends: list[tuple[float, float, float]] = field(default_factory=list)
    asks_s: list[float] = field(default_factory=list)
    reached: float = 0.0
    cut: str = ""

    def points(self, after: float) -> list[tuple[float, float]]:
        """Seconds and accuracy of what ended within this many trainings."""
        return [point for when, *point in self.ends if when <= after + _EPSILON]  # type: ignore[misc]

    def cut_before(self, after: float) -> str:
        """Why it did not get there, if it did not."""
        return self.cut if self.reached < after - _EPSILON else ""


def simulate(
    searcher: Searcher, problem: Problem, clock: Clock, trainings: int, seed: int, limit_s: float
) -> Run:
    """Run trainings one after another until they add up to so many, or on parallel workers in the mean time of so many.

    Args:
        trainings: how many; a stopped one counts by the share that it trained.
        limit_s: wall-clock seconds after which the search is cut short.
    """
    run, rng = Run(), np.random.default_rng(seed)
    curves: dict[int, tuple[list[float], int]] = {}  # of each trial, and how many tenths it trained
    deadline = time.monotonic() + limit_s
    training_s = problem.mean_seconds() / WORKERS if clock == "seconds" else 1.0
    now = 0.0

    def worker() -> Iterator[float]:
        """Yield the time until the next tenth of a training ends."""
        while now < trainings - _EPSILON:
            started = time.perf_counter()
            job = searcher.ask(deadline)
            run.asks_s.append(time.perf_counter() - started)
            seconds, number = problem.seconds(job.parameters), job.number
            curve, trained = (
                curves[job.continues]
                if job.continues is not None
                else (problem.curve(job.parameters, rng), 0)
            )
            until, stopped = round(job.until * FRACTIONS), False
            while trained < until and not stopped:
                yield (seconds / training_s if clock == "seconds" else 1.0) / FRACTIONS
                trained += 1
                if searcher.reports and trained < FRACTIONS:
                    stopped = searcher.report(number, trained / FRACTIONS, seconds, curve[trained - 1])
            curves[number] = curve, trained
            if trained == FRACTIONS:
                run.ends.append((now, seconds, problem.accuracy(job.parameters)))
            searcher.tell(number, trained / FRACTIONS, seconds, curve[trained - 1], stopped)

    try:
        workers = [worker() for _ in range(WORKERS if clock == "seconds" else 1)]
        queue = [(next(each), index) for index, each in enumerate(workers)]
        heapq.heapify(queue)
        while queue and queue[0][0] <= trainings + _EPSILON:
            now, index = heapq.heappop(queue)
            if (step := next(workers[index], None)) is not None:
                heapq.heappush(queue, (now + step, index))
    except LimitError:
        run.cut = f"limit {limit_s:g} s"
    except PeerError as error:
        run.cut = str(error)
    run.reached = now
    return run
