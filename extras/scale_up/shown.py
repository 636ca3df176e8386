"""What `bsearch ask --scale` prints: the best setting of a larger training, and what it rests on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.text import Text

from ...search.analysis.rates import Estimate
from ...search.report.terminal.fitted import Fitted
from ...spaces.readable import number
from .scaled_up import LAWS, NextStudy, ScaledUp

_EXPONENTS = {
    "batch_by_data": "batch by samples",
    "batch_by_model": "batch by model size",
    "rate_by_data": "rate by samples",
    "rate_by_model": "rate by model size",
}
# Fewer draws than this leave no interval that could be trusted.
_FEW_DRAWS = 20


def scale_up_document(study: str, found: ScaledUp) -> dict[str, Any]:
    """The JSON document of `bsearch ask --scale --json`."""
    return {
        "study": study,
        "trials": found.trials,
        "sizes": [asdict(size) for size in found.sizes],
        "from": asdict(found.begin),
        "target": asdict(found.target),
        "effective_batch": asdict(found.batch),
        "settings": [asdict(setting) for setting in found.settings],
        "exponents": {
            name: {"prior": asdict(prior), "fitted": asdict(fitted)} for name, (prior, fitted) in found.exponents.items()
        },
        "unchanged": {"effective_batch": found.carried[0], "learning_rate": found.carried[1]},
        "laws": {law.name: dict(zip(("effective_batch", "learning_rate"), found.by_law(law), strict=True)) for law in LAWS},
        "adaptive": found.adaptive,
        "passes": found.passes,
        "edges": list(found.edges),
        "contradicted": list(found.contradicted),
        "effective_draws": found.effective_draws,
        "next": found.next and asdict(found.next),
    }


def scale_up_parts(study: str, found: ScaledUp) -> Iterator[str | Text | Fitted]:
    """The same for people."""
    begin, target = found.begin, found.target
    count = len(found.sizes)
    yield Text(f"{study}: {found.trials} trials at {count} size{'s' * (count > 1)}", style="bold")
    apart = "" if begin in found.sizes else ", in different trials"
    more, wider = target.samples / begin.samples, target.parameters / begin.parameters
    of_begin, of_target = (
        f" and {size.parameters:,.0f} parameters" if begin.parameters > 1 else "" for size in (begin, target)
    )
    yield (
        f"Largest tried{apart}: {begin.samples:,.0f} samples{of_begin}. Predicted for "
        f"{target.samples:,.0f} samples{of_target} "
        f"({more:.3g}x, {wider:.3g}x)."
    )
    yield f"Best batch at that size: {found.batch.value:,.0f} ({found.batch.low:,.0f} to {found.batch.high:,.0f})."
    yield ""
    yield _settings(found)
    yield ""
    yield _exponents(found)
    yield ""
    others = [f"{law.name} alone: batch {batch:,.0f}, rate {rate:.3g}" for law in LAWS for batch, rate in [found.by_law(law)]]
    batch, rate = found.carried
    yield f"Carried over unchanged: batch {batch:,.0f}, rate {rate:.3g}. {'. '.join(others)}."
    for edge in found.edges:
        yield f"The best may lie beyond the {edge} tried."
    if found.contradicted:
        names = ", ".join(_EXPONENTS[name] for name in found.contradicted)
        yield f"These trials are far from the prior of: {names}."
    if found.effective_draws < _FEW_DRAWS:
        yield "These trials pin the exponents down more tightly than could be sampled: treat the intervals as rough."
    yield from _unseen(found)
    yield "Intervals are 90 %."


def next_sentence(file: str, found: NextStudy | None) -> str:
    """What the study written to a file would tell, or why none was written."""
    if found is None:
        return "Wrote nothing: no study that costs up to two trainings of that size would narrow an interval by 5%."
    batch, rate = (f"{1 - factor:.0%}" for factor in found.narrows)
    return (
        f"Wrote {file}: {found.trials} trials of {found.size.samples:,.0f} samples, in all {found.cost:.2g} trainings of the "
        f"predicted size. It would narrow the interval of the batch by {batch} and that of the rate by {rate}. Run it, then "
        "name it here too."
    )


def _unseen(found: ScaledUp) -> Iterator[str]:
    """Which exponents rest on what is published alone."""
    of_data = len({size.samples for size in found.sizes}) == 1 and found.target.samples != found.begin.samples
    of_model = len({size.parameters for size in found.sizes}) == 1 and found.target.parameters != found.begin.parameters
    words = [word for word, holds in (("number of samples", of_data), ("model size", of_model)) if holds]
    if words:
        if found.published:
            known = "the published ones"
        elif found.adaptive:
            known = (
                "guesses; the published ones are for a single pass over the data, and these trials make as many as "
                f"{found.passes:g} passes"
            )
        elif found.adaptive is None:
            known = "guesses, since these trials name no optimizer"
        else:
            known = "guesses; we know of none published for this optimizer"
        yield f"No trials differ in {' or '.join(words)}, so those exponents are {known}."


def _settings(found: ScaledUp) -> Fitted:
    decays = any(setting.weight_decay for setting in found.settings)
    names = ("effective_batch", "learning_rate", *(("weight_decay",) if decays else ()), "worse than\nthe best by")
    rows = []
    for setting in found.settings:
        given_up = "best" if setting.multiple == 1 else _range(setting.given_up)
        decay = [_range(setting.weight_decay)] if setting.weight_decay else [""] * decays
        rows.append((f"{setting.effective_batch:,}", _range(setting.learning_rate), *decay, given_up))
    return Fitted.of_rows(names, rows, (names[0], names[1], names[-1]))


def _exponents(found: ScaledUp) -> Fitted:
    rows = []
    for name, (before, after) in found.exponents.items():
        # The sum with 0 makes -0.00 to 0.00.
        each = (
            [f"{round(end, 2) + 0.0:.2f}" for end in (estimate.value, estimate.low, estimate.high)]
            for estimate in (before, after)
        )
        rows.append((_EXPONENTS[name], *(f"{value} ({low} to {high})" for value, low, high in each)))
    return Fitted.of_rows(("exponent", "prior", "fitted"), rows, ("exponent", "fitted"), words=("exponent",))


def _range(found: Estimate) -> str:
    value, low, high = (number(float(f"{end:.2g}")) for end in (found.value, found.low, found.high))
    return f"{value} ({low} to {high})"
