"""`bsearch bench`: do batch sizes have to be powers of two, on this model and this device?

Sizes are timed in rounds, in random order within each, so that two sizes compare as pairs under the same load. A difference
is called one only where its interval, widened for the number of comparisons, leaves zero out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from rich.table import Table
from scipy.stats import t as student

from ..objectives.bench import BenchFacts
from ..objectives.step_time import Round
from ..spaces.device import DeviceProfile
from ..spaces.errors import StudyFileError, cut
from ..spaces.memory import readable_bytes
from ..spaces.plan import BatchPlan
from .terminal import column, number, seconds

# MobileNetV3-large on CIFAR-10 at 224 pixels, V100, mixed precision, minutes of 10 epochs, one run each.
# Source: Raschka 2022, "Do Batch Sizes Actually Need to Be Powers of 2?", sebastianraschka.com/blog/2022/batch-size-2.html
PUBLISHED = {
    1: {100: 10.50, 127: 9.80, 128: 9.78, 129: 9.92, 156: 9.38, 511: 8.74, 512: 8.71, 513: 8.72},
    4: {255: 2.95, 256: 2.87, 257: 2.86},
}
# Sizes this near to a power of two, relative, are compared with it.
_NEAR = 0.05
# Suggestions of the rule that are tried.
_SUGGESTIONS = 2


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
            raise StudyFileError(f"--sizes: expected integers >= 1 or around:N, with commas between, got {cut(part, 60)!r}")
        size = int(found[2])
        near = (round(0.78 * size), size - 1, size, size + 1, round(1.22 * size))
        sizes.update(one for one in (near if found[1] else (size,)) if one >= 1)
    return sorted(sizes)


def suggested_sizes(facts: BenchFacts, low: int, high: int) -> list[int]:
    """Sizes int(n * 2^14 * SM / (H * W * C)) between two, for n = 1, 2, ...; a rule of thumb for convolutional nets.

    Source: quoted by Raschka 2022 (see PUBLISHED); SM is the number of a GPU's multiprocessors.

    >>> suggested_sizes(BenchFacts((3, 224, 224), 80), 1, 40)
    [8, 17, 26, 34]
    """
    if facts.image is None:
        return []
    one = (1 << 14) * facts.multiprocessors / math.prod(facts.image)
    return sorted({int(n * one) for n in range(1, int(high / one) + 1) if low <= int(n * one) <= high})


def some_suggestions(facts: BenchFacts, sizes: Sequence[int]) -> list[int]:
    """A few of them, spread over the sizes that are asked about."""
    every = suggested_sizes(facts, sizes[0], sizes[-1])
    places = [round((len(every) - 1) * (part + 1) / (_SUGGESTIONS + 1)) for part in range(_SUGGESTIONS)]
    return sorted({every[place] for place in places}) if every else []


@dataclass(frozen=True, slots=True)
class Difference:
    """Time per sample of one size against another's: relative, with an interval that holds for all comparisons at once."""

    size: int
    other: int
    change: float
    low: float
    high: float

    @property
    def real(self) -> bool:
        """Larger than the noise."""
        return self.low > 0 or self.high < 0

    def words(self) -> str:
        """In a line."""
        if not self.real:
            noise = f"from {self.low:+.1%} to {self.high:+.1%}"
            return f"{self.size} against {self.other}: no difference larger than the noise ({noise} a sample)"
        slower = "slower" if self.change > 0 else "faster"
        return (
            f"{self.size} against {self.other}: {abs(self.change):.1%} {slower} a sample ({self.low:+.1%} to {self.high:+.1%})"
        )


def differences(per_sample_s: Mapping[int, Sequence[float]], pairs: Sequence[tuple[int, int]]) -> list[Difference]:
    """Paired comparisons of sizes, round by round: Student's interval of the mean log ratio, after Bonferroni.

    Args:
        per_sample_s: seconds a sample of each round, by size.

    >>> timed = {127: [1.00, 1.10, 0.90, 1.01], 128: [1.01, 1.09, 0.91, 1.00], 129: [1.20, 1.31, 1.10, 1.22]}
    >>> [one.real for one in differences(timed, [(127, 128), (129, 128)])]
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
    facts: BenchFacts,
    peaks: Mapping[int, int],
    asked: Iterable[int],
    suggested: Sequence[int],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """The JSON document of `bsearch bench`.

    Args:
        plans: by size, in the order of the rounds' figures.
        peaks: peak bytes by micro-batch.
        asked: sizes that were asked about; the others are there for the rule's sake.
        rounds: those that count: the first, which warms up, is not among them.
    """
    assert profile.training_set is not None and profile.evaluation_set is not None
    rows, per_sample_s = [], {}
    for index, (size, plan) in enumerate(plans.items()):
        steps = [one.steps[index][0] for one in rounds]
        inference = [one.evaluations[index] * profile.evaluation_set for one in rounds]
        epochs = [step_s * profile.training_set / size for step_s in steps]
        per_sample_s[size] = [step_s / size for step_s in steps]
        rows.append(
            {
                "size": size,
                "micro_batch": plan.largest_micro_batch,
                "accumulation": plan.accumulation,
                "epoch_s": _mean_and_deviation(epochs),
                "inference_s": _mean_and_deviation(inference),
                "samples_per_s": _mean_and_deviation([size / step_s for step_s in steps]),
                "peak_bytes": peaks.get(plan.largest_micro_batch),
                "published_minutes": PUBLISHED.get(plan.devices, {}).get(size),
                "suggested": size in suggested,
            }
        )
    near = neighbours({*asked} & {*plans})
    beside = [(one, other) for one in suggested for other in (one - 1, one + 1) if {one, other} <= {*plans}]
    told = differences(per_sample_s, near + beside)
    return {
        **about,
        "device": profile.device,
        "rounds": len(rounds),
        "rows": rows,
        "differences": [_difference(one) for one in told[: len(near)]],
        "rule": {
            "image": facts.image,
            "multiprocessors": facts.multiprocessors,
            "suggested": list(suggested),
            "differences": [_difference(one) for one in told[len(near) :]],
        },
        "largest_micro_batch": profile.largest_micro_batch,
        "limit_bytes": profile.limit_bytes,
        "training_set": profile.training_set,
    }


def _mean_and_deviation(values: Sequence[float]) -> dict[str, float]:
    return {"mean": mean(values), "deviation": stdev(values) if len(values) > 1 else math.nan}


def _difference(one: Difference) -> dict[str, Any]:
    return {
        "size": one.size,
        "against": one.other,
        "change": one.change,
        "interval": [one.low, one.high],
        "real": one.real,
        "words": one.words(),
    }


def bench_tables(document: Mapping[str, Any]) -> Iterator[Table | str]:
    """The words and tables of `bsearch bench`."""
    devices = document["devices"]
    yield (
        f"{document['task']} on {devices} x {document['device']}, {document['precision']}; mean ± standard deviation over "
        f"{document['rounds']} rounds"
    )
    published = any(row["published_minutes"] for row in document["rows"])
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("size", "micro\nx acc.", "epoch", "inference", "samples/s", "peak", *(["published"] if published else []), ""):
        column(table, name, "right")
    for row in document["rows"]:
        reference = row["published_minutes"]
        table.add_row(
            str(row["size"]),
            f"{row['micro_batch']} x {row['accumulation']}",
            _with_deviation(row["epoch_s"], seconds),
            _with_deviation(row["inference_s"], seconds),
            _with_deviation(row["samples_per_s"], number),
            "-" if row["peak_bytes"] is None else readable_bytes(row["peak_bytes"]),
            *([f"{reference:.2f} min" if reference else ""] if published else []),
            "rule" if row["suggested"] else "",
        )
    yield table
    yield from document["left_out"]
    if published:
        where = "a V100" if devices == 1 else f"{devices} V100s"
        yield (
            f"published: minutes of 10 epochs of MobileNetV3-large on CIFAR-10 at 224 pixels on {where} in mixed precision, "
            "one run each (Raschka 2022)"
        )
    told = document["differences"]
    for one in told:
        yield one["words"]
    if told:
        real = sum(one["real"] for one in told)
        yield (
            f"Beside powers of two: {real} of {len(told)} differences are larger than the noise "
            "(95 % for all comparisons together)."
        )
    yield from _rule_words(document["rule"])
    if document["limit_bytes"] is None:
        yield "No memory limit here; --memory 2GiB finds the largest micro-batch that fits it."
    elif document["largest_micro_batch"] == document["training_set"]:
        yield f"The whole training set of {document['training_set']} samples fits {readable_bytes(document['limit_bytes'])}"
    else:
        yield f"The largest micro-batch that fits {readable_bytes(document['limit_bytes'])}: {document['largest_micro_batch']}"


def _rule_words(rule: Mapping[str, Any]) -> Iterator[str]:
    if rule["image"] is None:
        yield "The rule int(n x 2^14 x SM / (H x W x C)) speaks of images; these inputs are none."
        return
    channels, height, width = rule["image"]
    sizes = ", ".join(map(str, rule["suggested"])) or "none in this range"
    yield (
        f"The rule int(n x 2^14 x SM / (H x W x C)) with SM = {rule['multiprocessors']} and {height} x {width} x {channels} "
        f"suggests, among others: {sizes}"
    )
    if not rule["differences"]:
        return
    held = [one for one in rule["differences"] if one["real"] and one["change"] < 0]
    for one in rule["differences"]:
        yield f"  {one['words']}"
    verdict = (
        "it holds here" if len(held) == len(rule["differences"]) else "no sign that it holds here" if not held else "mixed"
    )
    yield f"  its sizes are faster than their neighbours in {len(held)} of {len(rule['differences'])} comparisons: {verdict}"


def _with_deviation(value: Mapping[str, float], words: Any) -> str:
    middle = value["mean"]
    share = value["deviation"] / middle if middle else 0.0
    return f"{words(middle)} ± {share:.1%}"
