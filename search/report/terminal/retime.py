"""What `bsearch show --profile` prints: a front on another device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.text import Text

from ...analysis.retime import Retimed, retimed_summary
from ...store.stored import StoredStudy
from ...store.url import shown_url
from ..answers import trial_summary
from ..export import study_document
from ..sentences import best_sentence
from .fitted import Fitted
from .tables import front_plot, front_table


def retimed_document(study: StoredStudy, device: str, after: Retimed) -> dict[str, Any]:
    """The JSON document of `bsearch show --profile --json`."""
    document = study_document(study.name, shown_url(study.url), after.front, after.records)
    document["front"] = [trial_summary(record, after.front) for record in after.front.trials]
    return document | {"device": device, "was": after.was, "left_out": after.left_out, "notes": after.notes}


def retimed_parts(
    study: StoredStudy, device: str, after: Retimed, width: int
) -> Iterator[Fitted | Text | str]:
    """The same for people.

    Args:
        width: of the terminal, in characters.
    """
    trials = len(after.records) + len(after.left_out)
    yield Text(
        f"Front of {study.name} on {device}: {len(after.front.trials)} of {trials} trials", style="bold"
    )
    yield front_table(after.front)
    yield front_plot(after.front, after.records, width)
    yield best_sentence(after.front) or ""
    yield from (retimed_summary(study.front, after), *after.notes, *after.left_out)
