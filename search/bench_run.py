"""Running `bsearch bench`: the sizes become plans, the plans are timed round by round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Any

from ..objectives.bench import bench_facts
from ..objectives.step_time import timed_rounds
from ..spaces.errors import InfeasiblePlanError, StudyFileError
from ..spaces.plan import BatchPlan, plan_batch
from ..spaces.study import StudySpec
from .bench import bench_document, some_suggestions
from .serial import SerialRunner
from .setups import micro_batch_cap, profile_request


def run_bench(spec: StudySpec, sizes: Sequence[int], repeats: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Time the sizes, and those that the rule suggests among them; the document of `bsearch bench`.

    Args:
        sizes: effective batches, ascending.
        repeats: rounds that count; one more goes before them.

    Raises:
        StudyFileError: no size can be planned.
        ObjectiveError: the training code does not work.
    """
    devices = max(spec.devices.counts)
    runner = SerialRunner(spec.devices)
    # What fits is looked for up to the training set's size, whatever sizes are asked about.
    request = replace(profile_request(spec, runner.device), timing_s=0.0, highest=spec.memory.largest_micro_batch or 1 << 30)
    tell("looking at memory ...")
    profile = runner.profile(spec.task, request)
    cap, smallest = micro_batch_cap(spec, profile, devices), profile.smallest_micro_batch
    suggested = some_suggestions(bench_facts(spec.task, request, ()), sizes)
    beside = [near for one in suggested for near in (one - 1, one, one + 1)]
    plans: dict[int, BatchPlan] = {}
    for size in sorted({*sizes, *beside}):
        try:
            plans[size] = plan_batch(size, devices=devices, largest_micro_batch=cap, smallest_micro_batch=smallest)
        except InfeasiblePlanError as error:
            tell(str(error))
    if not plans:
        raise StudyFileError(f"--sizes: expected sizes of at least {devices * smallest} samples, got {list(sizes)}")
    facts = bench_facts(spec.task, request, [plan.largest_micro_batch for plan in plans.values()])
    setup = replace(
        request.setup,
        plan=next(iter(plans.values())),
        smallest_micro_batch=smallest,
        memory_limit_bytes=profile.limit_bytes if profile.kind == "gpu" else None,
    )
    rounds = []
    with closing(timed_rounds(spec.task, setup, list(plans.values()), evaluates_each=True)) as timing:  # type: ignore[type-var]
        for seen in islice(timing, repeats + 1):
            rounds.append(seen)
            tell(f"timing {len(plans)} sizes: round {len(rounds)} of {repeats + 1}")
    about = {"task": spec.task, "precision": spec.training.precision, "devices": devices}
    return bench_document(profile, plans, rounds[1:], facts, suggested, about)
