"""Running `bsearch profile --batches`: the sizes become plans, the plans are timed round by round."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from statistics import mean, stdev
from typing import Any

from scipy.stats import t as student

from ...objectives.loading import load_task
from ...objectives.machine.device_memory import release_memory
from ...objectives.profiling.first_step import user_code_errors
from ...objectives.profiling.memory.tracing import MemoryProbe
from ...objectives.profiling.step_time import Round, timed_rounds
from ...objectives.task import Task
from ...spaces.errors import InfeasiblePlanError, StudyFileError, TaskError, cut
from ...spaces.laws.device import DeviceProfile, ProfileRequest
from ...spaces.plan import BatchPlan, accumulation_limits, plan_batch
from ...spaces.planning import micro_batch_cap
from ...spaces.profile_request import profile_request
from ...spaces.study.spec import StudySpec
from ..run.serial import SerialRunner

# Rounds that count, after one for warm-up; each times every size.
ROUNDS = 8


def run_bench(spec: StudySpec, sizes: Sequence[int], notify: Callable[[str], None]) -> dict[str, Any]:
    """Time the sizes; the document of `bsearch profile --batches`.

    Args:
        sizes: effective batches, ascending.
        notify: gets progress messages.

    Raises:
        StudyFileError: no size can be planned, or one is larger than the training set.
        TaskError: the training code does not work.
    """
    devices = max(spec.devices.counts)
    runner = SerialRunner(spec.devices)
    # The largest size that fits is searched for up to the training set's size, whatever sizes were requested.
    request = replace(profile_request(spec, runner.device), timing_s=0.0, highest=1 << 30, others=())
    notify("measuring memory ...")
    profile = runner.profile(spec.task, request)
    probe = _probe(spec.task, request)
    assert profile.training_set is not None
    if profile.unused_parameters:
        names = ", ".join(profile.unused_parameters)
        raise StudyFileError(f"{spec.task}: expected parameters that the task reads; it never read {names}")
    if sizes[-1] > profile.training_set:
        raise StudyFileError(f"sizes: expected at most the training set's {profile.training_set} samples, got {sizes[-1]}")
    plans, left_out = _plans(spec, profile, sizes)
    with user_code_errors(spec.task, f"measuring the memory of batches of up to {max(plans)}"):
        peaks = _peak_bytes(probe, [plan.largest_micro_batch for plan in plans.values()])
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
    with user_code_errors(spec.task, f"timing batches of up to {max(plans)}"), closing(timed) as timing:  # type: ignore[type-var]
        for seen in islice(timing, ROUNDS + 1):
            rounds.append(seen)
            notify(f"timing {len(plans)} sizes: round {len(rounds)} of {ROUNDS + 1}")
    about = {"task": spec.task, "precision": spec.training.precision, "devices": devices, "left_out": left_out}
    return bench_document(profile, plans, rounds[1:], peaks, about)


def _probe(reference: str, request: ProfileRequest) -> MemoryProbe:
    """A probe of a task's memory and input.

    Raises:
        TaskError: a generator, or code that breaks its contract.
    """
    task = load_task(reference)
    if not isinstance(task, Task):
        raise TaskError(f"task {reference}: expected a Task, got a generator, whose steps cannot be timed separately")
    return MemoryProbe(task, replace(request.setup, plan=BatchPlan(1)))


def _peak_bytes(probe: MemoryProbe, micro_batches: Iterable[int]) -> dict[int, int]:
    """Peak bytes of a training step by micro-batch: traced on a CPU, measured on a GPU."""
    peak = partial(probe.counted, "train") if probe.setup.device == "gpu" else probe.train_peak
    return {size: peak(size).total for size in sorted({*micro_batches})}


def _plans(spec: StudySpec, profile: DeviceProfile, sizes: Sequence[int]) -> tuple[dict[int, BatchPlan], list[str]]:
    """The plans of the sizes, and why some have none.

    Raises:
        StudyFileError: none has one.
    """
    devices = max(spec.devices.counts)
    limits: dict[str, Any] = {
        "largest_micro_batch": micro_batch_cap(spec, profile, devices),
        "smallest_micro_batch": profile.smallest_micro_batch,
        "every_micro_batch": spec.training.sync_batch_norm,
        **accumulation_limits(profile.embedding, couples_samples=profile.couples_samples),
    }
    plans: dict[int, BatchPlan] = {}
    left_out = []
    for size in sizes:
        try:
            plans[size] = plan_batch(size, devices=devices, **limits)
        except InfeasiblePlanError as error:
            left_out.append(f"{size} is left out: {error}")
    if not plans:
        raise StudyFileError(f"sizes: expected sizes that can be planned, got {list(sizes)}: {left_out[-1]}")
    return plans, left_out


# Sizes this near to a power of two, relative, are compared with it.
_NEAR = 0.05


def sizes_of(text: str) -> list[int]:
    """Sizes as the command line writes them, ascending.

    Raises:
        StudyFileError: no list of sizes.

    >>> sizes_of("around:128,500")
    [100, 127, 128, 129, 156, 500]
    """
    sizes: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(around:)?([1-9][0-9]{0,17})\s*", part)
        if found is None:
            raise StudyFileError(f"sizes: expected integers >= 1 or around:N, with commas between, got {cut(part, 60)!r}")
        size = int(found[2])
        near = (round(0.78 * size), size - 1, size, size + 1, round(1.22 * size))
        sizes.update(added for added in (near if found[1] else (size,)) if added >= 1)
    return sorted(sizes)


@dataclass(frozen=True, slots=True)
class Difference:
    """Relative difference in time per sample between two sizes, with an interval corrected for all comparisons."""

    size: int
    other: int
    change: float
    low: float
    high: float

    @property
    def real(self) -> bool:
        """Larger than the noise."""
        return self.low > 0 or self.high < 0

    def sentence(self) -> str:
        """As one line."""
        if not self.real:
            noise = f"from {self.low:+.1%} to {self.high:+.1%}"
            return f"{self.size} against {self.other}: no difference larger than the noise ({noise} per sample)"
        slower = "slower" if self.change > 0 else "faster"
        change = f"{abs(self.change):.1%} {slower} per sample"
        return f"{self.size} against {self.other}: {change} ({self.low:+.1%} to {self.high:+.1%})"


def differences(per_sample_s: Mapping[int, Sequence[float]], pairs: Sequence[tuple[int, int]]) -> list[Difference]:
    """Paired comparisons of sizes, round by round: Student's interval of the mean log ratio, Bonferroni-corrected.

    Args:
        per_sample_s: seconds per sample of each round, by size.

    >>> timed = {127: [1.00, 1.10, 0.90, 1.01], 128: [1.01, 1.09, 0.91, 1.00], 129: [1.20, 1.31, 1.10, 1.22]}
    >>> [difference.real for difference in differences(timed, [(127, 128), (129, 128)])]
    [False, True]
    """
    found = []
    for size, other in pairs:
        logs = [math.log(a / b) for a, b in zip(per_sample_s[size], per_sample_s[other], strict=True)]
        middle, rounds = mean(logs), len(logs)
        spread = stdev(logs) / math.sqrt(rounds) if rounds > 1 else math.inf
        half = float(student.ppf(1 - 0.05 / (2 * len(pairs)), rounds - 1)) * spread if rounds > 1 else math.inf
        found.append(Difference(size, other, math.expm1(middle), math.expm1(middle - half), math.expm1(middle + half)))
    return found


def neighbours(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Each size near a power of two with that power.

    >>> neighbours([100, 127, 128, 129, 156])
    [(127, 128), (129, 128)]
    """
    known = sorted(sizes)
    powers = [size for size in known if size & (size - 1) == 0]
    return [(size, power) for power in powers for size in known if size != power and abs(size / power - 1) <= _NEAR]


def bench_document(
    profile: DeviceProfile,
    plans: Mapping[int, BatchPlan],
    rounds: Sequence[Round],
    peaks: Mapping[int, int],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """The JSON document of `bsearch profile --batches`.

    Args:
        plans: by size, in the order of the rounds' figures.
        peaks: peak bytes by micro-batch.
        rounds: those that count, without the warm-up round.
    """
    assert profile.training_set is not None and profile.validation_set is not None
    rows, per_sample_s = [], {}
    for index, (size, plan) in enumerate(plans.items()):
        steps = [timed_round.steps[index][0] for timed_round in rounds]
        per_sample_s[size] = [step_s / size for step_s in steps]
        rows.append(
            {
                "size": size,
                "micro_batch": plan.largest_micro_batch,
                "accumulation": plan.accumulation,
                "epoch_s": _mean_and_std([step_s * profile.training_set / size for step_s in steps]),
                "inference_s": _mean_and_std([each.evaluations[index] * profile.validation_set for each in rounds]),
                "samples_per_s": _mean_and_std([size / step_s for step_s in steps]),
                "peak_bytes": peaks.get(plan.largest_micro_batch),
            }
        )
    return {
        **about,
        "device": profile.device,
        "rounds": len(rounds),
        "rows": rows,
        "differences": [
            {
                "size": one.size,
                "against": one.other,
                "change": one.change,
                "interval": [one.low, one.high],
                "real": one.real,
                "sentence": one.sentence(),
            }
            for one in differences(per_sample_s, neighbours(plans))
        ],
        "largest_micro_batch": profile.largest_micro_batch,
        "limit_bytes": profile.limit_bytes,
        "training_set": profile.training_set,
    }


def _mean_and_std(values: Sequence[float]) -> dict[str, float]:
    return {"mean": mean(values), "std": stdev(values) if len(values) > 1 else math.nan}
