"""What `bsearch scale-up` prints: the best setting of a larger training, and what it rests on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from ....spaces.readable import number
from ...analysis.rates import Estimate
from ...suggest.scale_up import LAWS, ScaledUp
from .tables import column

_EXPONENTS = {
    "batch_by_data": "batch by samples",
    "batch_by_model": "batch by model size",
    "rate_by_data": "rate by samples",
    "rate_by_model": "rate by model size",
}
# Fewer draws than this leave no interval that could be trusted.
_FEW_DRAWS = 20


def scale_up_document(study: str, found: ScaledUp) -> dict[str, Any]:
    """The JSON document of `bsearch scale-up --json`."""
    return {
        "study": study,
        "trials": found.trials,
        "sizes": [asdict(size) for size in found.sizes],
        "from": asdict(found.begin),
        "target": asdict(found.target),
        "settings": [asdict(setting) for setting in found.settings],
        "exponents": {name: {"published": asdict(one), "fitted": asdict(two)} for name, (one, two) in found.exponents.items()},
        "unchanged": {"effective_batch": asdict(found.carried[0]), "learning_rate": asdict(found.carried[1])},
        "laws": {law.name: dict(zip(("effective_batch", "learning_rate"), found.by_law(law), strict=True)) for law in LAWS},
        "edges": list(found.edges),
        "next": found.next and asdict(found.next),
    }


def scale_up_parts(study: str, found: ScaledUp) -> Iterator[str | Text | Table]:
    """The same for people."""
    begin, target = found.begin, found.target
    count = len(found.sizes)
    yield Text(f"{study}: {found.trials} trials at {count} size{'s' * (count > 1)}", style="bold")
    yield (
        f"Largest tried: {begin.samples:,.0f} samples, {begin.parameters:,.0f} parameters. Predicted: "
        f"{target.samples:,.0f} samples ({target.samples / begin.samples:.3g}x), {target.parameters:,.0f} parameters "
        f"({target.parameters / begin.parameters:.3g}x)."
    )
    yield ""
    yield _settings(found)
    yield ""
    yield _exponents(found)
    yield ""
    others = [f"{law.name} alone: batch {batch:,.0f}, rate {rate:.3g}" for law in LAWS for batch, rate in [found.by_law(law)]]
    batch, rate = found.carried
    yield f"Carried over unchanged: batch {batch.value:,.0f}, rate {rate.value:.3g}. {'. '.join(others)}."
    for edge in found.edges:
        yield f"The best is at the {edge} tried: the true one may lie beyond."
    if found.effective_draws < _FEW_DRAWS:
        yield "These trials contradict the published exponents: take the intervals as too narrow."
    yield from _unseen(found)
    yield "Intervals are 90 %."


def _unseen(found: ScaledUp) -> Iterator[str]:
    """Which exponents rest on what is published alone."""
    of_data = len({size.samples for size in found.sizes}) == 1 and found.target.samples != found.begin.samples
    of_model = len({size.parameters for size in found.sizes}) == 1 and found.target.parameters != found.begin.parameters
    words = [word for word, holds in (("numbers of samples", of_data), ("model sizes", of_model)) if holds]
    if words:
        yield f"There are no trials at different {' and '.join(words)}: those exponents are the published ones."


def _settings(found: ScaledUp) -> Table:
    decays = any(setting.weight_decay for setting in found.settings)
    table = Table(box=None, header_style="bold", pad_edge=False)
    names = ("effective_batch", "learning_rate", *(("weight_decay",) if decays else ()), "below the best by")
    for name in names:
        column(table, name, "right")
    for setting in found.settings:
        given_up = "best" if setting.multiple == 1 else _range(setting.given_up)
        decay = [_range(setting.weight_decay)] if setting.weight_decay else [""] * decays
        table.add_row(_range(setting.effective_batch, whole=True), _range(setting.learning_rate), *decay, given_up)
    return table


def _exponents(found: ScaledUp) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("exponent")
    for name in ("published", "with these trials"):
        column(table, name, "right")
    for name, (before, after) in found.exponents.items():
        table.add_row(_EXPONENTS[name], *(f"{one.value:.2f} ({one.low:.2f} to {one.high:.2f})" for one in (before, after)))
    return table


def _range(found: Estimate, *, whole: bool = False) -> str:
    value, low, high = (f"{one:,.0f}" if whole else number(float(f"{one:.2g}")) for one in (found.value, found.low, found.high))
    return f"{value} ({low} to {high})"
