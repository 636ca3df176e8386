"""What `show --json` and `run --json` say of a study: what a program needs to decide, and what to run next."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

from ...spaces.domain import bounds
from ...spaces.errors import StorageError
from ...spaces.laws.bottlenecks import bottlenecks
from ...spaces.record import counted
from ..analysis.choice import NEARLY_BEST, fastest_within
from ..run.profiles import stored_profiles
from ..store.url import shown_url
from .export import PLAN_COLUMNS, study_document, trial_document

if TYPE_CHECKING:
    from ...spaces.front import ParetoFront
    from ...spaces.laws.device import DeviceProfile
    from ...spaces.record import TrialRecord
    from ..run.events import Event
    from ..store.lock import Driver
    from ..store.stored import StoredStudy

# Facts of a setting's mean over seeds, where there are several runs of it; and of early ends.
_CERTAINTY = ("runs", "mean_low", "mean_high", "front_probability", "ties", "stopped_fraction", "message")


def trial_summary(record: TrialRecord, front: ParetoFront) -> dict[str, Any]:
    """What a decision needs of a trial: its results with their uncertainty, its plan, and its searched parameters."""
    known = trial_document(record, front)
    names = ("trial", "outcome", front.speed, front.metric, *PLAN_COLUMNS, *record.parameters, *_CERTAINTY)
    return {name: known[name] for name in dict.fromkeys(names) if known.get(name) is not None}


def study_answer(stored: StoredStudy, driver: Driver | None, study: str) -> dict[str, Any]:
    """The JSON document of `show --json` and `run --json`.

    Args:
        driver: that holds the study now.
        study: as an argument of other commands.
    """
    front, spec, records = stored.front, stored.spec, stored.records
    document = study_document(stored.name, shown_url(stored.url), front, records)
    best = front.best
    pick = "" if best is None else f" --pick {best.number}"
    profiles: Mapping[Any, DeviceProfile] = {}
    with closing(stored.tables()) as tables, suppress(StorageError):
        profiles = stored_profiles(stored, tables)
    limits = (
        []
        if not profiles
        else bottlenecks(next(iter(profiles.values())), int(bounds(spec.space.effective_batch)[1]), 0.0)
    )
    return {
        **document,
        "budget": {"trials": spec.budget.trials, "done": counted(records)},
        "running": None
        if driver is None or driver.gone
        else {"host": driver.host, "process": driver.process},
        "front": [trial_summary(record, front) for record in front.trials],
        "best": None if best is None else best.number,
        "nearly_best": fastest_within(front, NEARLY_BEST).number if front.trials else None,
        "limits": [limit.to_dict() for limit in limits],
        "next": {
            "keep_model": f"bsearch train {study}{pick or ' --pick best'}",
            "settings": f"bsearch export {study} --to pytorch{pick or ' --pick best'}",
            "whole": f"bsearch show {study} --all --json",
        },
    }


def event_answer(event: Event, metric: str) -> dict[str, Any]:
    """The JSON document of something that happened in a run, a line of `run --json`."""
    document: dict[str, Any] = {"event": event.kind, "text": event.text or None}
    if (setup := event.setup) is not None:
        document |= {
            "trial": setup.number,
            "attempt": setup.attempt,
            "effective_batch": setup.effective_batch,
        }
        document |= {
            "learning_rate": setup.learning_rate,
            "samples": None if setup.is_timed_by_clock else setup.samples_budget,
        }
        if (measured := event.measurement) is not None:
            document |= {"share": setup.share_of(measured), "metric": metric, "value": measured.value(metric)}
    if (record := event.record) is not None:
        document |= {"trial": record.number, "outcome": record.outcome, "train_s": record.train_s}
        document |= {"metric": metric, "value": record.accuracy, "message": record.message or None}
    return {name: value for name, value in document.items() if value is not None}
