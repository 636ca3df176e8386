"""The study that would tell most of a larger training, as the content of its file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...spaces.errors import StudyFileError
from ...spaces.record import TrialRecord
from ...spaces.study.file import study_from_dict
from ...spaces.study.spec import StudySpec
from .scaled_up import NextStudy, follows_size, size_of

# It searches batches and rates this many times smaller and larger than what is expected to be best.
_AROUND = 5
_NOT_NEXT = {"baseline", "stopping", "storage", "confirm", "warm_start"}


def next_study(spec: StudySpec, records: Sequence[TrialRecord], found: NextStudy) -> dict[str, Any]:
    """A study file's content for that study: the same but for its size, its space around the best, and its budget.

    Args:
        spec: of a study with trials of that many parameters.
        records: its trials.

    Raises:
        StudyFileError: its trials do not say how many samples an epoch has.
    """
    trained = [
        record for record in records if record.facts.epochs and record.facts.samples_budget and record.outcome == "complete"
    ]
    if not trained:
        raise StudyFileError(f"study {spec.study}: its trials know no epochs, so --then-run cannot write one with other epochs")
    # Of the widest and longest the best: parameters that are sizes under other names are fixed as there.
    largest = max(trained, key=lambda record: (size_of(record).parameters, size_of(record).samples))
    away = np.log([[size_of(record).samples, size_of(record).parameters] for record in trained])
    fixed = {
        name: largest.parameters[name]
        for name, values in ((name, [record.parameters.get(name) for record in trained]) for name in largest.parameters)
        if all(isinstance(value, int | float) for value in values) and follows_size(np.array(values, dtype=float), away)
    }
    per_epoch = (largest.facts.samples_budget or 0) / (largest.facts.epochs or 1)
    batch = round(found.effective_batch)
    content = spec.model_dump(mode="json", exclude_defaults=True, exclude=_NOT_NEXT)
    content.get("cluster", {}).pop("checkpoints", None)  # they are the study's own
    content = {key: value for key, value in content.items() if value != {}}
    content |= {
        "study": f"{spec.study}-next",
        "space": {
            **content["space"],
            **fixed,
            "effective_batch": {"low": max(1, round(batch / _AROUND)), "high": round(batch * _AROUND)},
            "reference_rate": {
                "low": float(f"{found.learning_rate / _AROUND:.2g}"),
                "high": float(f"{found.learning_rate * _AROUND:.2g}"),
                "at_batch": batch,
            },
            "epochs": float(f"{found.size.samples / per_epoch:.4g}"),
        },
        "budget": {"trials": found.trials},
        "stopping": "none",
    }
    study_from_dict(content)
    return content
