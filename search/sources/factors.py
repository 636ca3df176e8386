"""What a step's batch is made of: the batch of one device, its passes, and devices. Where several of these are there they have
to agree, and a number of devices by a name that is not known is asked about; it is never taken for 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ...spaces.errors import Fault, cut
from ...spaces.names import words_of
from ...spaces.readable import plural
from .names import meaning_of
from .runs import Run, Scalar
from .values import is_true, number

# Words of names that may count devices, and those beside which they do not.
_COUNTS = frozenset(
    {"gpu", "gpus", "device", "devices", "parallel", "world", "ranks", "node", "nodes", "dp", "tp", "pp"}
)
_COUNTS |= frozenset(
    {"ddp", "fsdp", "replicas", "replica", "shards", "cards", "accelerators", "tpu", "tpus", "npus"}
)
_COUNTS |= frozenset(
    {"hpus", "chips", "machines", "hosts", "procs", "processes", "nproc", "nprocs", "ngpu", "ntasks"}
)
_COUNTS |= frozenset({"instances"})
_OTHERWISE = frozenset(
    {"memory", "mem", "vram", "gb", "mb", "gib", "hours", "util", "utilization", "utilisation", "load"}
)
_OTHERWISE |= frozenset(
    {"power", "watts", "limit", "cap", "temp", "temperature", "energy", "price", "cost", "s", "seconds"}
)
_OTHERWISE |= frozenset(
    {"id", "idx", "index", "type", "name", "batch", "rank", "local", "hidden", "tree", "dim"}
)
_OTHERWISE |= frozenset(
    {
        "timeout",
        "bucket",
        "params",
        "epsilon",
        "peak",
        "workers",
        "envs",
        "reads",
        "rate",
        "cpu",
        "cpus",
        "samples",
        "tokens",
    }
)
# Parts of a world of which each trains on the same samples.
_WITHIN = frozenset({"tensor", "pipeline", "model", "tp", "pp", "context", "sequence", "expert", "world"})
_OF_DEVICES = frozenset({"gpu", "gpus", "device", "devices"})
Names = Mapping[str, str | None]


def with_devices_counted(run: Run) -> Run:
    """A run whose lists of devices are their number: `0,1,2,3` under `gpus` are four, `2` under CUDA_VISIBLE_DEVICES is one."""

    def counted(values: Mapping[str, Scalar]) -> dict[str, Scalar]:
        return {name: _count(name, value) for name, value in values.items()}

    return replace(
        run, settings=counted(run.settings), results=counted(run.results), values=counted(run.values)
    )


def _count(name: str, value: Scalar) -> Scalar:
    if isinstance(value, bool | float) or not _OF_DEVICES & set(words_of(name)):
        return value
    text = str(value)
    by_index = (
        {"visible", "ids"} & set(words_of(name))
        and re.fullmatch(r"[\w, -]+", text)
        and not re.search(r"\d-\d", text)
    )
    listed = by_index or re.fullmatch(r"\s*([\[(][\d, ]+[\])]|\d+( *, *\d+)+)\s*", text)
    if not listed:
        return value
    return len(re.findall(r"[\w-]+", text))


def factor_faults(
    where: str, runs: Sequence[Run], names: Names, mapped: Mapping[str, str]
) -> Iterator[Fault]:
    """Factors that are not understood, and values that contradict each other, each with a cell that shows it.

    Args:
        names: by meaning, those of batch, micro_batch, effective_batch, accumulation and devices, as they are taken.
        mapped: what the user has said, which is not questioned.
    """
    if "effective_batch" in mapped.values():
        return
    one = names["micro_batch"] or names["batch"]
    if names["effective_batch"] is None and one is not None:
        plain = names["micro_batch"] is None
        factors = list(dict.fromkeys(_unknown(runs, names, mapped)))
        if plain:  # which may be the batch of a whole step
            factors = [
                name for name in (names["accumulation"], names["devices"]) if name and _above_one(runs, name)
            ] + factors
        shown = [(name, *_above_one(runs, name)) for name in factors]  # type: ignore[misc]
        if shown and plain:
            listed = " and ".join(name for name, *_ in shown)
            hint = f"Write --map {one}=effective_batch where it is the batch of a whole step, or --map {one}=micro_batch."
            yield Fault(
                "",
                f"expected to know whether {one} counts {listed}, {shown[0][1]} at {shown[0][2]}. {hint}",
                where,
            )
        elif names["devices"] and (whole := _split(runs)) and whole[0] not in mapped:
            hint = f"Write --map {one}=effective_batch where that is split over them, or --map {whole[0]}=nothing."
            yield Fault(
                "",
                f"expected to know what {one} counts, {whole[0]} is {whole[1]} at {whole[2]}. {hint}",
                where,
            )
        elif shown:
            name, value, place = shown[0]
            hint = f"Write --map {name}=nothing where a step has no more samples by it, --map {name}=devices where it has."
            yield Fault(
                "",
                f"expected to know whether {name}, {value} at {place}, multiplies the batch. {hint}",
                where,
            )
    if names["micro_batch"] is not None:
        yield from _contradictions(where, runs, names, mapped)


def _unknown(runs: Sequence[Run], names: Names, mapped: Mapping[str, str]) -> Iterator[str]:
    """Names that seem to count devices, above 1 somewhere, and that are not taken for them."""
    of_data = names["devices"] is not None and bool(
        {"data", "dp", "replicas"} & set(words_of(names["devices"]))
    )
    for run in runs:
        for name in run.held:
            words = set(words_of(name))
            if (
                name in mapped
                or name in names.values()
                or not words & _COUNTS
                or words & _OTHERWISE
                or (of_data and words & _WITHIN)
            ):
                continue
            if _above_one([run], name):
                yield name


def _contradictions(
    where: str, runs: Sequence[Run], names: Names, mapped: Mapping[str, str]
) -> Iterator[Fault]:
    """A batch of a step that is not the product of its factors."""
    factors = [name for one in ("micro_batch", "accumulation", "devices") if (name := names[one]) is not None]
    others = [names["effective_batch"]] if names["effective_batch"] else []
    every = dict.fromkeys(name for run in runs for name in run.held)  # which not all runs have to hold
    others += [name for name in every if not others and meaning_of(name) == "batch" and name not in mapped]
    for other in others:
        apart = [run for run in runs if not _agree(run, other, names)]
        if other is None or not apart:
            continue
        held = apart[0].held
        product = " × ".join(f"{name} {held.get(name, 1)}" for name in factors)
        more = f", and {plural(len(apart) - 1, 'more run')} like it" if len(apart) > 1 else ""
        hint = f"Write --map {other}=effective_batch where it is the batch of a whole step, or --map {other}=nothing."
        message = f"expected batches that agree, got {other} {held[other]} beside {product} at {apart[0].place}{more}. {hint}"
        yield Fault("", message, where)


def _agree(run: Run, other: str, names: Names) -> bool:
    """Whether a batch may be that of a step, of a process or of a device, as far as its factors are known."""
    held = run.held
    whole, micro = number(held.get(other)), number(held.get(names["micro_batch"] or ""))
    if not whole or not micro:
        return True
    passes, devices = (number(held.get(names[one] or "")) or 1.0 for one in ("accumulation", "devices"))
    if other == names["effective_batch"]:
        known = names["devices"] is not None
        return whole == micro * passes * devices or (not known and whole % (micro * passes) == 0)
    return whole in {micro, micro * devices, micro * passes, micro * passes * devices}


def _split(runs: Sequence[Run]) -> tuple[str, Scalar, str] | None:
    """Where accelerate takes a loader's batch for that of all processes."""
    held = ((name, value, run.place) for run in runs for name, value in run.held.items())
    return next(
        (each for each in held if words_of(each[0])[-2:] == ["split", "batches"] and is_true(each[1])), None
    )


def _above_one(runs: Sequence[Run], name: str) -> tuple[str, str] | None:
    """A value above 1 under a name, with its place; None where there is none."""
    for run in runs:
        value = run.held.get(name)
        several = re.match(r"\s*(\d+)\s*[x×*]", value) if isinstance(value, str) else None  # as in 4xA100
        plain = number(several[1] if several else value)
        if not isinstance(value, bool) and plain is not None and plain > 1:
            return cut(str(value), 40), run.place
    return None
