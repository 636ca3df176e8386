"""What `bsearch profile` prints: a task's memory and step time on a device, as a document and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from ....objectives.profiling.memory_rows import MemoryRow
from ....spaces.laws.device import HEADROOM, DeviceProfile
from ....spaces.laws.step_time import StepTime
from ....spaces.planning import training_cost
from ....spaces.readable import number, readable_bytes, seconds
from ....spaces.study.spec import StudySpec
from ...preview.check import ProfiledStudy
from .fitted import Fitted


def profile_document(spec: StudySpec, profiled: ProfiledStudy) -> dict[str, Any]:
    """The JSON document of `bsearch profile --json`, which `show --profile` reads; tables show the first profile."""
    profiles = profiled.profiles
    first = next(iter(profiles.values()))
    return {
        "study": spec.study,
        "task": dict(profiled.task),
        "device": first.device,
        "precision": spec.training.precision,
        "training": training_cost(spec),
        "training_set": first.training_set,
        "memory": memory_document(spec, first, profiled.memory) if first.memory else None,
        "speed": [speed_document(variant, law) for variant in first.each for law in variant.step_times],
        "profiles": [
            {"parameters": dict(key), "profile": profile.to_dict()} for key, profile in profiles.items()
        ],
    }


def profile_parts(document: Mapping[str, Any]) -> Iterator[str | Text | Fitted]:
    """What `bsearch profile` prints for people."""
    yield Text(f"{document['study']} on {document['device']}, {document['precision']}", style="bold")
    yield from memory_tables(document["memory"])
    for law in document["speed"]:
        yield ""
        yield from speed_tables(law)


def speed_document(profile: DeviceProfile, law: StepTime) -> dict[str, Any]:
    """What is known of a task's step time on so many devices."""
    alone = profile.step_time(1)
    return {
        "devices": law.devices,
        "activation_checkpointing": law.activation_checkpointing,
        "embedding": law.embedding,
        "pair_s": law.pair_s,
        "interval": law.interval,
        "misfit": law.misfit,
        "update_s": law.update_s,
        "communication_s": None
        if alone is None or law.devices == 1
        else max(law.update_s - alone.update_s, 0.0),
        "evaluate_sample_s": law.evaluate_sample_s,
        "points": [
            {"micro_batch": size, "micro_batch_s": micro_batch_s} for size, micro_batch_s in law.points
        ],
        "timed": [
            {
                "effective_batch": timed_plan.plan.effective_batch,
                "accumulation": timed_plan.plan.accumulation,
                "micro_batch": timed_plan.plan.largest_micro_batch,
                "step_s": timed_plan.step_s,
                "known_step_s": law.step_s(timed_plan.plan),
                "input_s": timed_plan.input_s,
                "samples_per_s": timed_plan.plan.effective_batch / timed_plan.step_s,
                "rounds": len(timed_plan.rounds),
            }
            for timed_plan in law.timed
        ],
    }


def speed_tables(document: Mapping[str, Any]) -> Iterator[Fitted | str]:
    """The text and tables of step time on so many devices."""
    devices, misfit = document["devices"], document["misfit"]
    trust = "" if document["interval"] is None else f", ±{document['interval']:.1%}"
    if misfit is not None:
        trust += f"; plans it was not fitted to are predicted within {misfit[0]:.1%} (median), {misfit[1]:.1%} (worst)"
    yield f"Step time on {devices} device{'s' * (devices > 1)}{_with_checkpointing(document)}{trust}"
    names: tuple[str, ...] = ("effective_batch", "micro\nx acc.", "timed", "by law", "samples/s", "input")
    rows = (
        (
            str(row["effective_batch"]),
            f"{row['micro_batch']} x {row['accumulation']}",
            seconds(row["step_s"]),
            seconds(row["known_step_s"]),
            number(row["samples_per_s"]),
            f"{row['input_s'] / row['step_s']:.0%}",
        )
        for row in document["timed"]
    )
    yield Fitted.of_rows(names, rows, names)
    communication_s = document["communication_s"]
    yield f"A step takes {seconds(document['update_s'])} besides its micro-batches" + (
        "."
        if communication_s is None
        else f", {seconds(communication_s)} of them communication between devices."
    )


def _with_checkpointing(document: Mapping[str, Any]) -> str:
    mode, cached = document["activation_checkpointing"], document.get("embedding") == "cached"
    return (
        "" if mode == "none" else f" with {mode} activation checkpointing"
    ) + ", embeddings cached" * cached


def memory_document(spec: StudySpec, profile: DeviceProfile, rows: Sequence[MemoryRow]) -> dict[str, Any]:
    """What is known of a task's memory."""
    law = profile.memory
    assert law is not None
    largest = profile.largest_micro_batch
    return {
        "source": law.source,
        "bytes": "reserved" if profile.kind == "gpu" else "live",
        "note": law.note,
        "limit_bytes": profile.limit_bytes,
        "headroom": HEADROOM,
        "scale": law.scale,
        "fixed_bytes": law.fixed_bytes,
        "largest_micro_batch": largest,
        "largest_micro_batches": {
            variant.recomputed: variant.largest_micro_batch for variant in profile.each
        },
        "evaluation_batch": profile.evaluation_batch,
        "smallest_micro_batch": profile.smallest_micro_batch,
        "breakdown": dict(law.breakdown),
        "curve": [
            {
                "micro_batch": row.micro_batch,
                "activation_checkpointing": row.recomputed,
                "predicted_bytes": row.predicted,
                "measured_bytes": row.measured,
                "difference": None if row.measured is None else row.predicted / row.measured - 1,
            }
            for row in rows
        ],
        "largest_effective_batch": None
        if profile.limit_bytes is None or largest is None
        else {
            str(micro_batches): micro_batches * largest * max(spec.devices.counts)
            for micro_batches in ((1, 2, 4, 8, 16, 32) if profile.splits else (1,))
        },
    }


def memory_tables(document: Mapping[str, Any]) -> Iterator[Fitted | str]:
    """The text and tables of memory."""
    how = (
        "traced on fake tensors"
        if document["source"] == "traced"
        else f"counted on real tensors ({document['note']})"
    )
    yield f"Memory{' reserved by the GPU allocator' * (document['bytes'] == 'reserved')}, {how}"
    modes = document["largest_micro_batches"]
    checkpoints, embeds = set(modes) != {"none"}, any("unsplit" in mode or "cached" in mode for mode in modes)
    recomputed = "recomputed" if embeds else "activation\ncheckpointing"
    names, rows = ("micro_batch", *[recomputed] * checkpoints, "predicted", "measured", "difference"), []
    for row in document["curve"]:
        measured, difference = row["measured_bytes"], row["difference"]
        rows.append(
            (
                str(row["micro_batch"]),
                *[row["activation_checkpointing"]] * checkpoints,
                readable_bytes(row["predicted_bytes"]),
                "-" if measured is None else readable_bytes(measured),
                "-" if difference is None else f"{difference:+.1%}",
            )
        )
    yield Fitted.of_rows(names, rows, names)
    if document["bytes"] == "reserved" and all(row["measured_bytes"] is None for row in document["curve"]):
        yield "Nothing was measured: this is what CUDA's rules predict. On the device itself, real steps correct it."
    parts = ", ".join(
        f"{part} {readable_bytes(value)}" for part, value in document["breakdown"].items() if value
    )
    yield f"Breakdown at the largest traced size that fits: {parts}"
    largest = document["largest_micro_batch"]
    if document["limit_bytes"] is None:
        yield "memory.limit is not set: nothing limits the micro-batch here. Write limit: 10GiB, 90% or device."
        return
    each = ", ".join(f"{size} with {mode}" for mode, size in modes.items())
    if embeds:
        each = ", ".join(f"{size} ({mode})" for mode, size in modes.items())
    else:
        each = f"{each} activation checkpointing" if checkpoints else f"{largest}"
    yield (
        f"Limit {readable_bytes(document['limit_bytes'])}, {document['headroom']:.0%} kept free: the largest micro-batch is "
        f"{each}, the evaluation batch is {document['evaluation_batch']}"
    )
    reach = ", ".join(
        f"{batch} in {micro_batches}" for micro_batches, batch in document["largest_effective_batch"].items()
    )
    yield f"Largest effective batch by micro-batches per step: {reach}"
    if document["note"] and document["source"] == "traced":
        yield f"Note: {document['note']}"
