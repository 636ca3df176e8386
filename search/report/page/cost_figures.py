"""Figures of the device: memory and throughput by the micro-batch, as predicted and as measured."""

from __future__ import annotations

from ....spaces.laws.device import HEADROOM
from ....spaces.plan import BatchPlan
from .figure import Axis, Figure, Layer
from .study_data import StudyData


def memory_figure(data: StudyData) -> Figure | None:
    """Peak bytes against the micro-batch, with the limit."""
    profile = next(iter(data.profiles.values()), None)
    if profile is None or (law := profile.memory) is None:
        return None
    mebi = float(1 << 20)
    sizes = tuple(float(size) for size, _ in law.points)
    predicted = tuple(law.peak_bytes(size) / mebi for size, _ in law.points)
    layers = [Layer("predicted", "line", "law", sizes, predicted)]
    for other in profile.alternatives:
        if other.memory is None:
            continue
        more = tuple(float(size) for size, _ in other.memory.points)
        held = 2 * other.memory.held_bytes  # of a step of two such micro-batches
        bytes_there = tuple(
            (other.memory.peak_bytes(size) + held * size) / mebi for size, _ in other.memory.points
        )
        label = other.recomputed if other.embedding else f"{other.recomputed} activation checkpointing"
        layers.append(Layer(label, "line", "front", more, bytes_there))
    caption = (
        "Peak memory of a training step. "
        + ("Traced with fake tensors" if law.source == "traced" else "Measured with real tensors")
    ) + " before the first trial."
    limit, cap = profile.limit_bytes, profile.largest_micro_batch
    if limit is not None:
        usable = limit * (1 - HEADROOM) / mebi
        ends = (sizes[0], sizes[-1])
        layers.append(Layer("limit", "line", "limit", ends, (limit / mebi,) * 2))
        layers.append(Layer("limit minus headroom", "line", "alternative", ends, (usable,) * 2))
        caption += f" The largest micro-batch that fits is {cap}; larger batches accumulate, and the step stays the same."
    layers.append(
        data.points(
            "trials, measured",
            "measured",
            data.runs,
            x=lambda r: r.facts.micro_batch,
            y=lambda r: r.facts.peak_bytes and r.facts.peak_bytes / mebi,
        )
    )
    return Figure(
        "memory",
        f"Memory on {profile.device}",
        caption,
        Axis("micro_batch", "micro-batch (samples per forward pass on one device)"),
        Axis("peak_mib", "peak (MiB)"),
        tuple(layers),
    )


def step_time_figure(data: StudyData) -> Figure | None:
    """Samples per second against the micro-batch: by the step-time law, as timed for it, and as measured in trials."""
    profile = next(iter(data.profiles.values()), None)
    laws = profile.all_step_times if profile else ()
    layers = []
    for law, tone in zip(laws, ("law", "alternative", "limit", "front"), strict=False):
        prefix = (
            f"{law.devices} device{'s' * (law.devices > 1)}, "
            if len({other.devices for other in laws}) > 1
            else ""
        )
        if law.activation_checkpointing != "none":
            prefix += f"{law.activation_checkpointing} activation checkpointing, "
        fewest = 2 if law.embedding == "cached" else 1
        prefix += "embeddings cached, " * (fewest > 1)
        sizes = _between(law.points[0][0], law.points[-1][0])
        plans = [BatchPlan(size * fewest * law.devices, fewest, law.devices) for size in sizes]
        rate = tuple(plan.effective_batch / law.seconds_of(plan) for plan in plans)
        layers.append(Layer(f"{prefix}step-time law", "line", tone, tuple(map(float, sizes)), rate))  # type: ignore[arg-type]
        timed = [timed_plan for timed_plan in law.timed if timed_plan.plan.accumulation == fewest]
        layers.append(
            Layer(
                f"{prefix}timed for the law",
                "points",
                tone,  # type: ignore[arg-type]
                tuple(float(timed_plan.plan.largest_micro_batch) for timed_plan in timed),
                tuple(timed_plan.plan.effective_batch / timed_plan.step_s for timed_plan in timed),
                low=tuple(timed_plan.plan.effective_batch / max(timed_plan.rounds) for timed_plan in timed),
                high=tuple(timed_plan.plan.effective_batch / min(timed_plan.rounds) for timed_plan in timed),
            )
        )
    ran = [r for r in data.runs if r.facts.steps and r.facts.accumulation == 1]
    layers.append(
        data.points(
            "trials, measured",
            "measured",
            ran,
            x=lambda r: r.facts.micro_batch,
            y=lambda r: r.facts.measured_train_s and (r.facts.samples_budget or 0) / r.facts.measured_train_s,
        )
    )
    intervals = [law.interval for law in laws if law.interval is not None]
    caption = "Throughput of whole steps without accumulation."
    if intervals:
        caption += f" The law was fitted to ± {max(intervals):.1%}; concurrent trials may run slower."
    return Figure(
        "step-time",
        "Throughput against the micro-batch",
        caption,
        Axis("micro_batch", "micro-batch (samples per forward pass on one device)", log=True),
        Axis("samples_per_s", "samples per second"),
        tuple(layers),
    )


def _between(low: int, high: int, most: int = 60) -> list[int]:
    """Sizes from low to high, evenly spaced on a log scale."""
    return sorted({round(low * (high / low) ** (part / (most - 1))) for part in range(most)})
