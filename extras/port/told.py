"""A recipe on other devices, for `bsearch port`: a document, and text for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ...spaces.plan import BatchPlan
from ...spaces.readable import readable_bytes, seconds
from .memory import Memory
from .ported import Ported


def port_document(ported: Ported) -> dict[str, Any]:
    """The JSON document of `bsearch port --json`."""
    recipe, memory = ported.recipe, ported.memory
    near = ported.nearest
    return {
        "recipe": str(recipe.path),
        "library": recipe.library.title,
        "read": {key: recipe.settings[key] for key in recipe.read},
        "kept": recipe.kept,
        "not_known": recipe.unknown,
        "before": _split(ported.before),
        "target": asdict(ported.target),
        "memory": asdict(memory) if isinstance(memory, Memory) else {"unknown": memory},
        "plan": None if ported.plan is None else _split(ported.plan),
        "identical": ported.plan is not None and not ported.differs and not recipe.unknown,
        "differs": list(ported.differs),
        "warnings": list(ported.warned),
        "nearest": None
        if near is None
        else {**_split(near.plan), "rates": near.rates, "decays": near.decays, "steps": near.steps},
        "step_s": ported.step_s,
        "changes": ported.changes,
    }


def _split(plan: BatchPlan) -> dict[str, int]:
    return {
        "effective_batch": plan.effective_batch,
        "devices": plan.devices,
        "micro_batch": plan.largest_micro_batch,
        "accumulation": plan.accumulation,
    }


def port_lines(ported: Ported) -> Iterator[str]:
    """What `bsearch port` prints for people."""
    recipe, before, target = ported.recipe, ported.before, ported.target
    length = recipe.get("length")
    rows = f"rows of at most {int(float(length)):,} tokens" if length is not None else "rows"
    yield f"{recipe.path.name}, for {recipe.library.title}: {_told(before)} {rows} a step"
    yield f"read:        {_listed(recipe.read)}"
    yield f"kept as is:  {_listed(recipe.kept)}"
    yield f"not known:   {_listed(recipe.unknown)}" + (
        "  (kept as is; check whether they affect a step)" if recipe.unknown else ""
    )
    yield ""
    where = f"{target.devices} x {target.name}"
    memory = ported.memory
    if isinstance(memory, Memory):
        how = "activations recomputed" if memory.checkpointing == "full" else "activations kept"
        if memory.checkpointing == "full" and not recipe.get("checkpointing"):
            how += ", which the recipe did not"
        yield f"{where}: at most {memory.largest} rows per micro-batch fit in {readable_bytes(memory.limit_bytes)} ({how})"
        over = next((point for point in memory.points if point[1] > memory.limit_bytes), None)
        for size, value in memory.points:
            if size in (1, memory.largest) or (size, value) == over:
                much = "  does not fit" if value > memory.limit_bytes else ""
                yield f"  {size:>5} row{'s' if size > 1 else ' '}  {readable_bytes(value):>9}{much}"
        yield from (f"  assumed: {assumption}" for assumption in memory.assumed)
        yield "  traced as CUDA would run it; not measured on such a card"
    else:
        yield f"{where}: memory is not known: {memory}"
    yield ""
    if ported.plan is not None:
        yield f"the same batch: {_told(ported.plan)} rows a step"
    else:
        yield f"{target.devices} devices cannot share {before.effective_batch} rows equally: {_told(ported.written)} instead"
    yield from (f"  differs: {difference}" for difference in ported.differs)
    if not ported.differs:
        yield "  identical to the recipe up to rounding: each step is the mean over all tokens of the same rows"
        yield "    (needs transformers 4.54 and a model that takes num_items_in_batch; otherwise it is a mean of means)"
        if recipe.unknown:
            yield f"    unless one of these affects a step: {_listed(recipe.unknown)}"
    yield from (f"  note: {warning}" for warning in ported.warned)
    if ported.step_s is not None:
        yield f"  a step takes {seconds(ported.step_s)}, by the profile"
    if ported.nearest is not None:
        yield from _nearest_lines(ported)
    yield ""
    old = {key: "(none)" if recipe.settings.get(key) is None else recipe.settings[key] for key in ported.changes}
    yield "changes: " + ("; ".join(f"{key} {old[key]} -> {value}" for key, value in ported.changes.items()) or "none")


def _nearest_lines(ported: Ported) -> Iterator[str]:
    near = ported.nearest
    assert near is not None
    if ported.plan is not None:
        yield f"  near it, in fewer micro-batches: {_told(near.plan)} rows a step"
    middle, unchanged, linear = near.rates
    if middle:
        yield f"  learning rate {middle:.3g} there (unchanged: {unchanged:.3g}, linear scaling: {linear:.3g})"
    if near.decays is not None:
        low, high = min(near.decays), max(near.decays)
        yield f"  weight decay {near.decays[0]:.3g} ({low:.3g} to {high:.3g} with these rates), to act over as many samples"


def _told(plan: BatchPlan) -> str:
    devices = f"{plan.devices} device{'s' * (plan.devices > 1)}"
    return f"{devices} x {plan.largest_micro_batch} x {plan.accumulation} = {plan.effective_batch:,}"


def _listed(keys: Sequence[str]) -> str:
    return ", ".join(keys) or "-"
