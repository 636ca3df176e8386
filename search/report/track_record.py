"""What was predicted of trials beside what came: the record that a study's predictions are judged by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from statistics import median

from ...spaces.errors import StorageError
from ...spaces.laws.device import HEADROOM, DeviceProfile
from ...spaces.planning import CostKey, cost_key
from ...spaces.readable import readable_bytes, seconds
from ...spaces.record import TrialFacts, TrialRecord
from ...spaces.trial import TrialSetup
from ..run.opening import HOLDS, quantile, widened
from ..run.profiles import stored_profiles
from ..store.stored import StoredStudy

# A smaller share of a training explains no delay, and as small a delay has no cause worth naming.
_TELLS = 0.1
_TIME, _MEMORY = "training time", "peak memory"
RECORD_COLUMNS = ("trial", "what", "predicted", "came", "ratio", "within")


@dataclass(frozen=True, slots=True)
class Settled:
    """A prediction of a trial that has ended.

    Args:
        what: "training time", in seconds, or "peak memory" of a step on one device, in bytes.
        stated: relative half width of the interval that was given with it; None where none was.
    """

    trial: int
    what: str
    predicted: float
    came: float
    stated: float | None

    @property
    def error(self) -> float:
        """Relative: 0.5 where it came half as large again."""
        return self.came / self.predicted - 1

    @property
    def is_within(self) -> bool:
        """Memory that was not used is no fault."""
        return (self.error if self.what == _MEMORY else abs(self.error)) <= (self.stated or 0.0)


@dataclass(frozen=True, slots=True)
class TrackRecord:
    """The settled predictions of one quantity.

    Args:
        trials: that have one.
        stated: relative half width that was given with them; None where none was.
        within: of them, that came within.
        ratio: what came over what was predicted: 5 %, 50 % and 95 % of the trials.
        interval: relative half width that holds 90 % of them, where the stated one does not.
    """

    what: str
    trials: int
    stated: float | None
    within: int
    ratio: tuple[float, float, float]
    interval: float | None

    @classmethod
    def of(cls, settled: Sequence[Settled]) -> TrackRecord:
        """Of one quantity's predictions, at least one."""
        errors = sorted(each.error for each in settled)
        what, stated = settled[0].what, settled[0].stated
        misses = errors if what == _TIME else [max(error, 0.0) for error in errors]
        within = sum(each.is_within for each in settled)
        low, middle, high = (1 + quantile(errors, share) for share in (0.05, 0.5, 0.95))
        return cls(what, len(settled), stated, within, (low, middle, high), widened(stated, misses))


def settled_predictions(study: StoredStudy) -> list[Settled]:
    """Every prediction that a study's ended trials have settled, by quantity and trial."""
    profiles: dict[CostKey, DeviceProfile] = {}
    setups: dict[int, TrialSetup] = {}
    # Gone since it was read: its trials are shown all the same.
    with (
        suppress(StorageError),
        closing(study.tables()) as tables,
    ):
        profiles, setups = stored_profiles(study, tables), tables.setups(study.name)
    intervals = [
        law.interval
        for profile in profiles.values()
        for law in profile.all_step_times
        if law.interval is not None
    ]
    stated = max(intervals, default=None)
    times = [
        Settled(r.number, _TIME, came / (1 + error), came, stated)
        for r in study.records
        if r.counts
        and (error := r.facts.train_s_error) is not None
        and (came := r.facts.measured_train_s)
        and error > -1
    ]
    return [*times, *_memory(study, profiles, setups)]


def _memory(
    study: StoredStudy, profiles: Mapping[CostKey, DeviceProfile], setups: Mapping[int, TrialSetup]
) -> Iterator[Settled]:
    if len({record.facts.device_kind for record in study.records if record.facts.attempts}) > 1:
        return  # the law is that of one of them
    for record in study.records:
        came, setup = record.facts.peak_reserved_bytes or record.facts.peak_bytes, setups.get(record.number)
        if not came or setup is None:
            continue
        profile = profiles.get(cost_key(study.spec, {**study.spec.fixed(), **setup.cost_parameters}))
        variant = profile and profile.under(setup.plan)
        if variant and (law := variant.memory) and setup.plan.largest_micro_batch <= law.points[-1][0]:
            held = law.held_bytes * setup.effective_batch + variant.extra_bytes(setup.plan.devices)
            predicted = law.peak_bytes(setup.plan.largest_micro_batch) + held
            yield Settled(record.number, _MEMORY, predicted, came, HEADROOM)


def track_records(settled: Iterable[Settled]) -> list[TrackRecord]:
    """The record of each quantity that has settled predictions."""
    each: dict[str, list[Settled]] = {}
    for one in settled:
        each.setdefault(one.what, []).append(one)
    return [TrackRecord.of(some) for some in each.values()]


def record_sentences(records: Sequence[TrialRecord], settled: Sequence[Settled]) -> Iterator[str]:
    """What was predicted and what came, a sentence for each quantity.

    >>> settled = [Settled(n, "training time", 10.0, 13.0, 0.07) for n in range(5)]
    >>> facts = TrialFacts(measured_train_s=13.0, waited_s=2.6)
    >>> print(*record_sentences([TrialRecord(n, "complete", {}, facts) for n in range(5)], settled))
    Training times were predicted to ±7.0%, and 0 of 5 came within: they took 1.30 times the predicted time (median; 90% of \
them 1.30 to 1.30): waiting for a core took 20 % of training. The front has the predicted times, of a training alone.
    """
    for found in track_records(settled):
        how = (
            "roughly"
            if found.stated is None
            else f"to ±{found.stated:.1%}, and {found.within} of {found.trials} came within"
        )
        begin = f"Training times were predicted {how}"
        low, middle, high = found.ratio
        if found.what == _MEMORY:
            yield (
                f"Peak memory: {found.within} of {found.trials} trials used at most {found.stated:.0%} more than predicted; "
                f"the median used {middle:.2f} times the prediction."
            )
        elif found.within >= HOLDS * found.trials:
            yield f"{begin}."
        else:
            told = f"{begin}: they took {middle:.2f} times the predicted time (median; 90% of them {low:.2f} to {high:.2f})"
            if abs(middle - 1) > _TELLS:
                missed = {each.trial for each in settled if each.what == _TIME and not each.is_within}
                told += f": {delay_words([record.facts for record in records if record.number in missed])}"
            slow = " A new study on an idle machine would have shorter ones." if middle < 1 - _TELLS else ""
            yield f"{told}. The front has the predicted times, of a training alone.{slow}"


def record_rows(settled: Iterable[Settled]) -> Iterator[tuple[str, ...]]:
    """Every settled prediction under `RECORD_COLUMNS`."""
    for each in settled:
        predicted, came = map(seconds if each.what == _TIME else readable_bytes, (each.predicted, each.came))
        yield (
            str(each.trial),
            each.what,
            predicted,
            came,
            f"{1 + each.error:.2f}",
            "yes" if each.is_within else "no",
        )


def delay_words(late: Sequence[TrialFacts]) -> str:
    """Why trials took another time than predicted, by what was measured beside them (medians)."""
    if median(facts.train_s_error or 0.0 for facts in late) < 0:
        return "steps were probably timed under load"

    def shares(taken: str) -> list[float]:
        return [
            (getattr(facts, taken) or 0.0) / facts.measured_train_s
            for facts in late
            if facts.measured_train_s
        ]

    causes: dict[str, list[float]] = {
        "waiting for a core took {:.0f} % of training": shares("waited_s"),
        "the container's processor limit (cpu.max) took {:.0f} % of it": shares("throttled_s"),
        "other programs used {:.0f} % of the machine": [facts.others_share or 0.0 for facts in late],
        "its host gave {:.0f} % of its processor time to other virtual machines": [
            facts.stolen_share or 0.0 for facts in late
        ],
    }
    medians = {words: median(found or [0.0]) for words, found in causes.items()}
    if found := [words.format(100 * share) for words, share in medians.items() if share >= _TELLS]:
        return ", and ".join(filter(None, (", ".join(found[:-1]), found[-1])))
    if any(facts.others_share is not None for facts in late):
        return (
            "other programs used little of the machine, so training probably waits for something, such as input, that did not "
            "delay the steps that were timed"
        )
    return "the device was probably shared with the driver, other trials or other programs"
