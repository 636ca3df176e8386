"""Running `bsearch bench`: the sizes become plans, the plans are timed round by round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Any

from ..objectives.bench import bench_facts, bench_probe, peak_bytes
from ..objectives.probe import told
from ..objectives.step_time import Round, timed_rounds
from ..objectives.training import release_memory
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
        StudyFileError: no size can be planned, or one is larger than the training set.
        ObjectiveError: the training code does not work.
    """
    devices = max(spec.devices.counts)
    runner = SerialRunner(spec.devices)
    # What fits is looked for up to the training set's size, whatever sizes are asked about.
    request = replace(profile_request(spec, runner.device), timing_s=0.0, highest=1 << 30, others=())
    tell("looking at memory ...")
    profile = runner.profile(spec.task, request)
    probe = bench_probe(spec.task, request)
    assert profile.training_set is not None
    if profile.unused_parameters:
        names = ", ".join(profile.unused_parameters)
        raise StudyFileError(f"{spec.task}: expected parameters that the task reads; it never asked for {names}")
    if sizes[-1] > profile.training_set:
        raise StudyFileError(f"--sizes: expected at most the training set's {profile.training_set} samples, got {sizes[-1]}")
    facts = bench_facts(probe)
    suggested = some_suggestions(facts, sizes)
    beside = [near for one in suggested for near in (one - 1, one, one + 1) if near <= profile.training_set]
    limits: dict[str, Any] = {
        "largest_micro_batch": micro_batch_cap(spec, profile, devices),
        "smallest_micro_batch": profile.smallest_micro_batch,
        "every_pass": spec.training.sync_batch_norm,
    }
    plans: dict[int, BatchPlan] = {}
    left_out = []
    for size in sorted({*sizes, *beside}):
        try:
            plans[size] = plan_batch(size, devices=devices, **limits)
        except InfeasiblePlanError as error:
            left_out.append(f"{size} is left out: {error}")
    if not plans:
        raise StudyFileError(f"--sizes: expected sizes that can be planned, got {list(sizes)}: {left_out[-1]}")
    with told(spec.task, f"looking at batches of up to {max(plans)}"):
        peaks = peak_bytes(probe, [plan.largest_micro_batch for plan in plans.values()])
    del probe
    setup = replace(
        request.setup,
        plan=next(iter(plans.values())),
        smallest_micro_batch=profile.smallest_micro_batch,
        memory_limit_bytes=profile.limit_bytes if profile.kind == "gpu" else None,
    )
    rounds: list[Round] = []
    release_memory(profile.kind)  # ranks have this process's device among theirs
    timed = timed_rounds(spec.task, setup, list(plans.values()), evaluates_each=True)
    with told(spec.task, f"timing batches of up to {max(plans)}"), closing(timed) as timing:  # type: ignore[type-var]
        for seen in islice(timing, repeats + 1):
            rounds.append(seen)
            tell(f"timing {len(plans)} sizes: round {len(rounds)} of {repeats + 1}")
    about = {"task": spec.task, "precision": spec.training.precision, "devices": devices, "left_out": left_out}
    return bench_document(profile, plans, rounds[1:], facts, peaks, sizes, suggested, about)
