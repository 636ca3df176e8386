"""What follows from raw data: the same claims on the machine that measured, and wherever its report is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from ...objectives.profiling.fit import with_uncertainty
from ...objectives.profiling.step_time import Round, fitted
from ...spaces.laws.step_time import StepTime
from ...spaces.plan import BatchPlan
from .claims import Claim, Data, Fact, of_repeats, worst

_MIB = 1 << 20
# The allocator reserves large blocks in pages of 20 MiB: two numbers of pages may differ by one each.
_PAGES = 40 * _MIB


def following(data: Iterable[Data]) -> Iterator[Claim | Fact]:
    """The claims and facts that follow from a stage's data."""
    by_kind: dict[str, list[Data]] = {}
    for case in data:
        by_kind.setdefault(case.kind, []).append(case)
    for kind, cases in by_kind.items():
        if kind in RULES:
            yield from RULES[kind](cases)


def rounded(value: Any) -> Any:
    """Seconds to six digits, however they are nested: a report is read by people, too."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else [rounded(item) for item in value]


def medians(bursts: Sequence[Sequence[Sequence[float]]]) -> tuple[float, float, list[float]]:
    """Median seconds of a step of each of two loops, and the median of first / second - 1 for each time they were built."""
    first_s, second_s = (
        median(column) for column in zip(*(pair for built in bursts for pair in built), strict=True)
    )
    return first_s, second_s, [median(first / second - 1 for first, second in built) for built in bursts]


def overhead(case: Data) -> Claim:
    """How much longer our loop's steps take than a minimal one's.

    Values:
        bursts: for each time that both loops were built, the seconds of a step of each, burst by burst.
    """
    ours_s, plain_s, ratios = medians(case.values["bursts"])
    note = f"{1e3 * ours_s:.2f} ms against {1e3 * plain_s:.2f}"
    return of_repeats(f"overhead of our loop over a minimal loop: {case.case}", 0.02, ratios, note=note)


def law_of(case: Data) -> StepTime:
    """The law of step time of the plans that it is fitted to."""
    plans, rounds = _timed(case)
    count = case.values["fitted"]
    return with_uncertainty(
        fitted([Round(timed_round.steps[:count]) for timed_round in rounds], plans[:count])
    )


def _timed(case: Data) -> tuple[list[BatchPlan], list[Round]]:
    plans = [BatchPlan(*plan) for plan in case.values["plans"]]
    return plans, [
        Round(tuple((seconds, waited) for seconds, waited in steps)) for steps in case.values["rounds"]
    ]


def step_times(cases: Sequence[Data]) -> Iterator[Claim]:
    """Errors of the law on plans that it was not fitted to.

    Values:
        plans: (effective batch, accumulation) each; the law is fitted to the first `fitted`.
        rounds: for each plan, seconds of a step, and of it those that waited for input; the first round is a warm-up.
    """
    for case in cases:
        plans, rounds = _timed(case)
        law = law_of(case)
        errors, noise = [], []
        for index in range(case.values["fitted"], len(plans)):
            seconds = [timed_round.steps[index][0] for timed_round in rounds[1:]]
            plan, middle = plans[index], median(seconds)
            errors.append(
                (f"{plan.effective_batch} in {plan.accumulation}", abs(law.step_s(plan) / middle - 1))
            )
            noise.append(_uncertainty(seconds))
        uncertainty = math.hypot(median(noise), law.interval or 0.0)
        middle = median(error for _, error in errors)
        yield Claim(
            f"median error of predicted step time, untimed plans: {case.case}",
            0.03,
            middle,
            uncertainty,
            cases=len(errors),
            note=f"{len(rounds) - 1} rounds",
        )
        for claim in worst(f"largest error of predicted step time, untimed plans: {case.case}", 0.08, errors):
            yield replace(claim, uncertainty=max(noise) + (law.interval or 0.0))


def sustained(cases: Sequence[Data]) -> Iterator[Claim]:
    """The error of a predicted step time in training that goes on: clocks fall while a device grows warm.

    Values:
        predicted_s: by the law.
        short: seconds of the plan's steps in the rounds that the law was fitted to.
        bursts: seconds of a step, burst by burst.
    """
    for case in cases:
        predicted_s, bursts = case.values["predicted_s"], case.values["bursts"]
        late = bursts[len(bursts) // 2 :]
        error = of_repeats("", 0.0, [second / predicted_s - 1 for second in late]).uncertainty
        found = median(late) / predicted_s - 1
        text = f"error of predicted step time in sustained training: {case.case}"
        yield Claim(text, 0.05, abs(found), error + _uncertainty(case.values["short"]), note=f"{found:+.1%}")


def _uncertainty(seconds: Sequence[float]) -> float:
    """Half the 95 % interval of the median of repeats, as a share of it."""
    middle = median(seconds)
    return of_repeats("", 0.0, [second / middle - 1 for second in seconds]).uncertainty


def peaks(cases: Sequence[Data]) -> Iterator[Claim | Fact]:
    """Errors of predicted peaks.

    Values:
        device: `cpu` or `gpu`.
        expandable: whether the allocator grows its segments.
        sizes: (micro-batch, traced live and total bytes, measured live and total bytes) each.
        untraced: why it could not be traced; empty: it could.
    """
    live, reserved, uncalibrated, untraced, constants = (list[tuple[str, float]]() for _ in range(5))
    gpu, expandable = cases[0].values["device"] == "gpu", cases[0].values["expandable"]
    for case in cases:
        fixed = fixed_live = 0
        if reason := case.values["untraced"]:
            yield Fact(case.case, f"not traced: {reason}")
            untraced.append((case.case, 1.0))
        for place, (size, traced_live, traced, measured_live, measured) in enumerate(case.values["sizes"]):
            name = f"{case.case}, {size}"
            untraced.append((name, 0.0))
            if place == 0 and gpu:
                # As a study does: the smallest size tells what libraries take for themselves.
                fixed, fixed_live = measured - traced, measured_live - traced_live
                constants.append((case.case, abs(fixed) / _MIB))
                yield Fact(f"beside the traced tensors: {case.case}", f"{fixed / _MIB:.1f} MiB")
                continue
            live.append((name, abs((traced_live + fixed_live) / measured_live - 1)))
            if gpu:
                reserved.append((name, max(abs(traced + fixed - measured) - _PAGES, 0) / measured))
                uncalibrated.append((name, abs(traced / measured - 1)))
                yield Fact(
                    name,
                    f"live {traced_live / _MIB:.0f} MiB traced, {measured_live / _MIB:.0f} measured; "
                    f"reserved {traced / _MIB:.0f}, {measured / _MIB:.0f}",
                )
    after = " after one run of the smallest micro-batch" if gpu else ""
    # Without segments that grow, a library's workspace may need one of its own, where the replay has room between blocks.
    bound, allocator = (0.03, "") if expandable else (0.08, ", default allocator")
    yield from worst("steps that could not be traced", 0, untraced, unit="")
    yield from worst(f"error of the predicted peak, live bytes{after}", 0.02, live)
    text = (
        f"error of the predicted peak beyond two of the allocator's pages, reserved bytes{after}{allocator}"
    )
    yield from worst(text, bound, reserved)
    yield from worst(
        "bytes that the smallest micro-batch takes beside its prediction", 256, constants, unit="MiB"
    )
    for claim in worst("", 0.0, uncalibrated):
        yield Fact(
            "reserved bytes before anything was measured",
            f"off by at most {claim.measured_text} ({claim.note})",
        )


RULES: dict[str, Callable[[Sequence[Data]], Iterator[Claim | Fact]]] = {
    "overhead": lambda cases: map(overhead, cases),
    "peaks": peaks,
    "step times": step_times,
    "sustained": sustained,
}
