"""Every figure of a study, from its trials and its laws."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from ....spaces.domain import Choices
from ....spaces.errors import StudyFileError
from ....spaces.front import ParetoFront
from ....spaces.laws.device import DeviceProfile
from ....spaces.learning_rate import RULE_EXPONENTS
from ....spaces.plan import BatchPlan
from ....spaces.readable import number
from ....spaces.record import TrialRecord
from ....spaces.study.goals import Speed
from ...analysis.confirm import averaged
from ...analysis.rates import BestRates
from ...analysis.retime import Retimed
from ...laws.best_rate import rates_of
from ...run.profiles import stored_profiles
from ...store.stored import StoredStudy
from ..terminal.tables import rule_verdict
from .devices import devices_figure
from .figure import Axis, Figure, Layer, Tone
from .powers_of_two import PowersOfTwo, powers_of_two
from .timeline import timeline_figure

# Each measure of speed in a title, and its unit on an axis.
_MEASURES: dict[Speed, tuple[str, str]] = {
    "train_s": ("training time", "seconds of training"),
    "device_s": ("training time", "seconds of training × devices"),
    "cost": ("cost", "of a training, without evaluation"),
    "energy_j": ("energy", "joules of a training, without evaluation"),
}


@dataclass(frozen=True)
class StudyFigures:
    """The data of a study's figures, read once; the front figure needs only the study.

    Args:
        curves: (samples seen, accuracy) by trial.
        attempts: as stored in the database.
        profiles: of the device that trials are timed for, by parameters that change cost; empty if none is stored.
        devices: the trials on other devices, to be compared.
    """

    study: StoredStudy
    curves: Mapping[int, list[tuple[int, float]]] = field(default_factory=dict)
    attempts: Sequence[Mapping[str, Any]] = ()
    profiles: Mapping[Any, DeviceProfile] = field(default_factory=dict)
    devices: Mapping[str, Retimed] = field(default_factory=dict)

    @classmethod
    def of(cls, study: StoredStudy, devices: Mapping[str, Retimed] = MappingProxyType({})) -> StudyFigures:
        tables = study.tables()
        return cls(study, tables.curves(study.name), tables.attempts(study.name), stored_profiles(study, tables), devices)

    @property
    def front(self) -> ParetoFront:
        return self.study.front

    @cached_property
    def rates(self) -> BestRates | None:
        """The best rate at each batch; None if the trials do not determine it."""
        try:
            return rates_of(self.study)
        except StudyFileError:
            return None

    @cached_property
    def powers_of_two(self) -> PowersOfTwo | None:
        return powers_of_two(self.study, self.profiles)

    def all(self) -> list[Figure]:
        """The figures that the study has data for, in reading order."""
        figures = (
            self.front_figure(),
            self.devices_figure(),
            self.batch_accuracy(),
            self.batch_time(),
            self.rate_figure(),
            self.importance_figure(),
            *self.parameter_figures(),
            self.memory_figure(),
            self.step_time_figure(),
            self.powers_figure(),
            self.curves_figure(),
            timeline_figure(self.study.records, self.attempts, self.label),
        )
        return [figure for figure in figures if figure is not None and any(layer.x for layer in figure.layers)]

    # The front

    def front_figure(self) -> Figure:
        """Accuracy over seconds."""
        front, records = self.front, self.study.records
        members = {trial.number for trial in front.trials}
        # A setting that was trained several times is drawn at its mean.
        others = [r for r in averaged(records, self.study.spec.objectives) if r.number not in members]
        repeats = [r for r in records if r.outcome == "complete" and r.is_repeat]
        floor = self._floor()
        layers = [
            self._points("other trials", "other", others),
            self._points("single runs of repeated settings", "other", repeats, shown=False),
            self._points("stopped early", "stopped", [r for r in records if r.outcome == "stopped"], shown=False),
            self._points("paused", "paused", [r for r in records if r.outcome == "paused"], shown=False),
            *(
                self._rug(outcome, tone, [r for r in records if r.outcome == outcome], floor)
                for outcome, tone in _FAILED_TONES.items()
            ),
            self._line("front", front.curve),
            *self._marked(),
        ]
        how = "predicted from the device's step times" if self._source == "known" else "measured as wall-clock time"
        caption = (
            f"No trial is both {front.faster} and better than a trial on the front. Training time is {how}, without evaluation."
        )
        if front.second_speed is not None:
            caption = (
                f"No trial beats a trial on the front in all of {front.speed}, {front.second_speed} and {front.metric}; the "
                f"line leaves out members that are on it only for their {front.second_speed}. Training time is {how}, without "
                "evaluation."
            )
        if any(trial.interval is not None for trial in front.trials):
            caption += " Bars are 90 % intervals of the mean over runs with several seeds."
        if self._levels:
            caption += " Trials far worse than the front are outside the axis range; the CSV has them."
        return Figure(
            "front",
            f"{front.metric} against {_MEASURES[front.speed][0]}",
            caption,
            self._time_axis(),
            self._accuracy_axis(),
            tuple(layer for layer in layers if layer.x),
        )

    def _time_axis(self) -> Axis:
        return Axis(self.front.speed, f"{self.front.speed} ({_MEASURES[self.front.speed][1]})", log=True)

    def _accuracy_axis(self) -> Axis:
        better = "higher" if self.front.direction == "maximize" else "lower"
        return Axis(self.front.metric, f"{self.front.metric} ({better} is better)", ends=self._levels)

    @cached_property
    def _levels(self) -> tuple[float, float] | None:
        """The accuracies that figures show: without trials so bad that they would flatten all others; None shows every one."""
        members = [float(trial.accuracy or 0.0) for trial in self.front.trials]
        if len(members) < 2 or not max(members) > min(members):
            return None
        reach = max(members) - min(members)
        levels = [float(r.accuracy or 0.0) for r in self.study.records if r.outcome == "complete" and _finite(r.accuracy)]
        shown = [*members, *(level for level in levels if min(members) - reach <= level <= max(members) + reach)]
        if len(shown) == len(members) + len(levels):
            return None
        bars = [end for trial in self.front.trials for end in trial.interval or ()]
        room = 0.05 * (max(shown) - min(shown))
        return min([*shown, *bars]) - room, max([*shown, *bars]) + room

    @property
    def _source(self) -> str:
        return next((str(r.facts.train_s_source) for r in self.front.trials if r.facts.train_s_source is not None), "measured")

    def _floor(self) -> float:
        """A level below all accuracies that are shown, for trials without one."""
        if self._levels:
            return self._levels[self.front.direction == "minimize"]
        levels = [float(r.accuracy or 0.0) for r in self.study.records if r.outcome == "complete" and _finite(r.accuracy)]
        if not levels:
            return 0.0
        low, high = min(levels), max(levels)
        gap = 0.06 * ((high - low) or abs(high) or 1.0)
        return high + gap if self.front.direction == "minimize" else low - gap

    def _points(self, name: str, tone: Tone, records: Iterable[TrialRecord], *, shown: bool = True) -> Layer:
        chosen = [r for r in records if _finite(self.front.taken(r)) and _finite(r.accuracy)]
        intervals = tone == "front" and bool(chosen) and all(r.interval is not None for r in chosen)
        return Layer(
            name,
            "points",
            tone,
            tuple(float(self.front.taken(r) or 0.0) for r in chosen),
            tuple(float(r.accuracy or 0.0) for r in chosen),
            low=tuple(r.interval[0] for r in chosen if r.interval) if intervals else (),
            high=tuple(r.interval[1] for r in chosen if r.interval) if intervals else (),
            labels=tuple(self.label(r) for r in chosen),
            trials=tuple(r.number for r in chosen),
            shown=shown,
        )

    def _rug(self, outcome: str, tone: Tone, records: Iterable[TrialRecord], floor: float) -> Layer:
        """Trials without an accuracy, at the bottom of the figure; those without a time are left out."""
        chosen = [r for r in records if _finite(self.front.taken(r))]
        return Layer(
            f"{outcome} (no accuracy)",
            "points",
            tone,
            tuple(float(self.front.taken(r) or 0.0) for r in chosen),
            (floor,) * len(chosen),
            labels=tuple(self.label(r) for r in chosen),
            trials=tuple(r.number for r in chosen),
            shown=False,
        )

    def _line(self, name: str, trials: Sequence[TrialRecord], tone: Tone = "front") -> Layer:
        """The best accuracy on a front at every training time."""
        times = tuple(float(self.front.taken(trial) or 0.0) for trial in trials)
        return Layer(name, "steps", tone, times, tuple(float(trial.accuracy or 0.0) for trial in trials))

    def _marked(self) -> Iterator[Layer]:
        """The front's trials as points, then the knee and the baseline."""
        front = self.front
        members = self._points("trials on the front", "front", front.trials)
        batch_of = {trial.number: str(trial.settings.get("effective_batch", "")) for trial in front.trials}
        yield replace(members, batches=tuple(batch_of[number] for number in members.trials))
        yield self._points("knee", "knee", [trial for trial in front.trials if trial.number == front.knee])
        yield self._points("baseline", "baseline", self.baseline)

    @cached_property
    def baseline(self) -> list[TrialRecord]:
        """The baseline trials; with the mean of their runs if they are on the front."""
        members = {trial.number: trial for trial in self.front.trials}
        complete = [r for r in self.study.records if r.is_baseline and not r.is_repeat and r.outcome == "complete"]
        return [members.get(r.number, r) for r in complete]

    def label(self, record: TrialRecord) -> str:
        """A trial in a few lines, as hover text."""
        values = record.settings
        lines = [f"trial {record.number}" + ("" if record.outcome == "complete" else f", {record.outcome.replace('_', ' ')}")]
        if _finite(record.accuracy):
            interval = ""
            if record.half_interval is not None:
                interval = f" ± {number(record.half_interval)}"
            lines.append(f"{self.front.metric} {number(record.accuracy)}{interval} {self.front.takes(record)}")
        if "effective_batch" in values:
            lines.append(f"effective batch {values['effective_batch']}{_plan_label(values)}")
        if "learning_rate" in values:
            lines.append(f"learning rate {number(values['learning_rate'])} ({values.get('rule', 'constant')})")
        lines += [
            f"{name} {number(value)}"
            for name, value in record.parameters.items()
            if name not in _LABELLED and value is not None
        ]
        if record.message and record.outcome != "complete":
            lines.append(record.message.splitlines()[0][:100])
        return "\n".join(lines)

    def devices_figure(self) -> Figure | None:
        """The fronts of other devices; None where none are compared."""
        return devices_figure(self.devices, self.study.spec.objectives, _MEASURES) if self.devices else None

    # Batches and rates

    def batch_accuracy(self) -> Figure | None:
        """Effective batch against accuracy."""
        if "effective_batch" not in self.study.spec.searched():
            return None
        return Figure(
            "batch-accuracy",
            f"Effective batch against {self.front.metric}",
            "All trials by batch. Other settings vary too, so the upper edge of the cloud matters."
            if self.front.direction == "maximize"
            else "All trials by batch. Other settings vary too, so the lower edge of the cloud matters.",
            _BATCH,
            self._accuracy_axis(),
            self._by_batch(lambda r: r.accuracy),
        )

    def batch_time(self) -> Figure | None:
        """Effective batch against seconds per 1000 samples."""
        if "effective_batch" not in self.study.spec.searched():
            return None
        return Figure(
            "batch-time",
            "Effective batch against time",
            "Training time per 1000 samples, so that training runs of different lengths can be compared.",
            _BATCH,
            Axis("seconds_per_1000_samples", "seconds per 1000 samples", log=True),
            self._by_batch(_seconds_per_thousand),
        )

    def _by_batch(self, value: Any) -> tuple[Layer, ...]:
        members = {trial.number for trial in self.front.trials}
        groups: list[tuple[str, Tone, list[TrialRecord]]] = [
            ("other trials", "other", [r for r in self._runs if r.number not in members]),
            ("trials on the front", "front", list(self.front.trials)),
            ("baseline", "baseline", self.baseline),
        ]
        layers = []
        for name, tone, records in groups:
            chosen = [r for r in records if _finite(value(r)) and "effective_batch" in r.settings]
            layers.append(
                Layer(
                    name,
                    "points",
                    tone,
                    tuple(float(r.settings["effective_batch"]) for r in chosen),
                    tuple(float(value(r)) for r in chosen),
                    labels=tuple(self.label(r) for r in chosen),
                    trials=tuple(r.number for r in chosen),
                )
            )
        return tuple(layer for layer in layers if layer.x)

    @cached_property
    def _runs(self) -> list[TrialRecord]:
        """Complete trials, each setting once."""
        return [r for r in self.study.records if r.outcome == "complete" and not r.is_repeat]

    def rate_figure(self) -> Figure | None:
        """Learning rate against batch, with the fitted best rate and the scaling rules through it."""
        chosen = [
            r
            for r in self._runs
            if r.facts.learning_rate is not None and "effective_batch" in r.settings and _finite(r.accuracy)
        ]
        if len({r.facts.learning_rate for r in chosen}) < 2:
            return None
        layers = [
            Layer(
                "trials",
                "points",
                "other",
                tuple(float(r.settings["effective_batch"]) for r in chosen),
                tuple(float(r.facts.learning_rate or 0.0) for r in chosen),
                labels=tuple(self.label(r) for r in chosen),
                trials=tuple(r.number for r in chosen),
                values=tuple(float(r.accuracy or 0.0) for r in chosen),
            )
        ]
        found = self.rates
        if found is None:
            caption = "Too few trials that learned, or too little spread, to estimate the best rate at each batch."
        else:
            batches = tuple(float(rate.effective_batch) for rate in found.rates)
            fitted = tuple(rate.learning_rate.value for rate in found.rates)
            low = tuple(rate.learning_rate.low for rate in found.rates)
            high = tuple(rate.learning_rate.high for rate in found.rates)
            middle = found.rates[len(found.rates) // 2]
            layers.insert(0, Layer("90 % interval", "band", "law", batches, fitted, low=low, high=high))
            layers.append(Layer("best rate, fitted", "line", "law", batches, fitted))
            for rule in ("linear", "sqrt"):
                through = tuple(
                    middle.learning_rate.value * (batch / middle.effective_batch) ** RULE_EXPONENTS[rule] for batch in batches
                )
                layers.append(Layer(f"rule {rule}", "line", "limit" if rule == "linear" else "alternative", batches, through))
            verdict = rule_verdict(found)
            caption = verdict[0].upper() + verdict[1:] + (" " if verdict.endswith(".") else ". ")
            caption += f"Fitted to {found.trials} trials" + (
                f"; {found.left_out} that failed to learn are left out." if found.left_out else "."
            )
        return Figure(
            "rate-batch",
            "Learning rate against effective batch",
            caption,
            _BATCH,
            # The fitted interval may reach far beyond the rates that were tried.
            Axis("learning_rate", "learning rate", log=True, ends=_around(float(r.facts.learning_rate or 0.0) for r in chosen)),
            tuple(layers),
            value_name=self.front.metric,
        )

    # Other parameters

    def importance_figure(self) -> Figure | None:
        """How much each searched parameter mattered."""
        from ...suggest.importance import parameter_importances

        shares = sorted(parameter_importances(self.study).items(), key=lambda item: item[1])
        if not shares:
            return None
        places = tuple(map(float, range(len(shares))))
        ends = tuple(share for _, share in shares)
        labels = tuple(f"{name}: {share:.0%}" for name, share in shares)
        bars = Layer("importance", "bars", "front", ends, places, low=(0.0,) * len(shares), high=ends, labels=labels)
        return Figure(
            "importance",
            f"What mattered to {self.front.metric}",
            f"Share of the variance of {self.front.metric} over the whole space that each parameter explains by itself "
            "(fANOVA), estimated from this study's trials. A parameter searched in a narrow range explains little.",
            Axis("share", "share of variance"),
            Axis("parameter", "", ticks=tuple((place, name) for place, (name, _) in zip(places, shares, strict=True))),
            (bars,),
        )

    def parameter_figures(self) -> Iterator[Figure]:
        """A figure for each searched parameter that has none of its own: its values against the metric."""
        searched = self.study.spec.searched()
        edge = "upper" if self.front.direction == "maximize" else "lower"
        members = {trial.number for trial in self.front.trials}
        groups: tuple[tuple[str, Tone, list[TrialRecord]], ...] = (
            ("other trials", "other", [r for r in self._runs if r.number not in members]),
            ("trials on the front", "front", list(self.front.trials)),
            ("baseline", "baseline", self.baseline),
        )
        for name, domain in searched.items():
            if name in _OWN_FIGURES:
                continue
            choices = list(domain.choices) if isinstance(domain, Choices) else []
            layers = []
            for label, tone, records in groups:
                chosen = [r for r in records if _finite(r.accuracy) and _placed(r.parameters.get(name), choices)]
                at = [choices.index(r.parameters[name]) if choices else float(r.parameters[name]) for r in chosen]
                layers.append(
                    Layer(
                        label,
                        "points",
                        tone,
                        tuple(map(float, at)),
                        tuple(float(r.accuracy or 0.0) for r in chosen),
                        labels=tuple(map(self.label, chosen)),
                        trials=tuple(r.number for r in chosen),
                    )
                )
            ticks = tuple((float(place), str(choice)) for place, choice in enumerate(choices))
            yield Figure(
                f"parameter-{name}",
                f"{name} against {self.front.metric}",
                f"Other parameters vary too, so compare the best trials at each value, the {edge} edge of the cloud.",
                Axis(name, name, log=bool(getattr(domain, "log", False)), ticks=ticks),
                self._accuracy_axis(),
                tuple(layer for layer in layers if layer.x),
            )

    # The device

    @cached_property
    def _profile(self) -> DeviceProfile | None:
        return next(iter(self.profiles.values()), None)

    def memory_figure(self) -> Figure | None:
        """Peak bytes against the micro-batch, with the limit."""
        measured = [r for r in self._runs if r.facts.peak_bytes is not None and r.facts.micro_batch is not None]
        law = self._profile.memory if self._profile else None
        if law is None:
            return None
        mebi = float(1 << 20)
        sizes = tuple(float(size) for size, _ in law.points)
        predicted = tuple(law.peak_bytes(size) / mebi for size, _ in law.points)
        layers = [Layer("predicted", "line", "law", sizes, predicted)]
        for other in self._profile.alternatives if self._profile else ():
            if other.memory is None:
                continue
            more = tuple(float(size) for size, _ in other.memory.points)
            held = 2 * other.memory.held_bytes  # of a step of two such micro-batches
            bytes_there = tuple((other.memory.peak_bytes(size) + held * size) / mebi for size, _ in other.memory.points)
            label = other.recomputed if other.embedding else f"{other.recomputed} activation checkpointing"
            layers.append(Layer(label, "line", "front", more, bytes_there))
        caption = (
            "Peak memory of a training step. "
            + ("Traced with fake tensors" if law.source == "traced" else "Measured with real tensors")
        ) + " before the first trial."
        assert self._profile is not None
        limit, cap = self._profile.limit_bytes, self._profile.largest_micro_batch
        if limit is not None:
            headroom = self.study.spec.memory.headroom
            usable = limit * (1 - headroom) / mebi
            ends = (sizes[0], sizes[-1])
            layers.append(Layer("limit", "line", "limit", ends, (limit / mebi,) * 2))
            if headroom:
                layers.append(Layer("limit minus headroom", "line", "alternative", ends, (usable,) * 2))
            caption += f" The largest micro-batch that fits is {cap}; larger batches accumulate, and the step stays the same."
        if measured:
            layers.append(
                Layer(
                    "trials, measured",
                    "points",
                    "measured",
                    tuple(float(r.facts.micro_batch or 0) for r in measured),
                    tuple(float(r.facts.peak_bytes or 0) / mebi for r in measured),
                    labels=tuple(self.label(r) for r in measured),
                    trials=tuple(r.number for r in measured),
                )
            )
        return Figure(
            "memory",
            f"Memory on {self._profile.device}",
            caption,
            Axis("micro_batch", "micro-batch (samples per forward pass on one device)"),
            Axis("peak_mib", "peak (MiB)"),
            tuple(layers),
        )

    def step_time_figure(self) -> Figure | None:
        """Samples per second against the micro-batch: by the step-time law, as timed for it, and as measured in trials."""
        laws = self._profile.all_step_times if self._profile else ()
        layers = []
        for law, tone in zip(laws, ("law", "alternative", "limit", "front"), strict=False):
            prefix = f"{law.devices} device{'s' * (law.devices > 1)}, " if len({one.devices for one in laws}) > 1 else ""
            if law.activation_checkpointing != "none":
                prefix += f"{law.activation_checkpointing} activation checkpointing, "
            fewest = 2 if law.embedding == "cached" else 1
            prefix += "embeddings cached, " * (fewest > 1)
            sizes = _between(law.points[0][0], law.points[-1][0])
            plans = [BatchPlan(size * fewest * law.devices, fewest, law.devices) for size in sizes]
            rate = tuple(plan.effective_batch / law.seconds_of(plan) for plan in plans)
            layers.append(Layer(f"{prefix}step-time law", "line", tone, tuple(map(float, sizes)), rate))  # type: ignore[arg-type]
            timed = [one for one in law.timed if one.plan.accumulation == fewest]
            layers.append(
                Layer(
                    f"{prefix}timed for the law",
                    "points",
                    tone,  # type: ignore[arg-type]
                    tuple(float(one.plan.largest_micro_batch) for one in timed),
                    tuple(one.plan.effective_batch / one.step_s for one in timed),
                    low=tuple(one.plan.effective_batch / max(one.rounds) for one in timed),
                    high=tuple(one.plan.effective_batch / min(one.rounds) for one in timed),
                )
            )
        ran = [
            r
            for r in self._runs
            if r.facts.steps and r.facts.micro_batch and r.facts.measured_train_s and r.facts.accumulation == 1
        ]
        layers.append(
            Layer(
                "trials, measured",
                "points",
                "measured",
                tuple(float(r.facts.micro_batch or 0) for r in ran),
                tuple(float(r.facts.samples_budget or 0) / float(r.facts.measured_train_s or 1.0) for r in ran),
                labels=tuple(self.label(r) for r in ran),
                trials=tuple(r.number for r in ran),
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
            tuple(layer for layer in layers if layer.x),
        )

    # Further figures

    def powers_figure(self) -> Figure | None:
        """What a search over powers of two would have found."""
        found = self.powers_of_two
        if found is None:
            return None
        layers = [
            self._line("any integer", self.front.trials),
            replace(self._points("any integer, trials", "front", self.front.trials), low=(), high=()),
        ]
        if found.moved is not None:
            layers.append(self._line("at the nearest power of two", found.moved.trials, "alternative"))
        if found.kept.trials:
            layers.append(self._points("trials with a power of two", "limit", found.kept.trials))
        return Figure(
            "powers-of-two",
            "If the batch were limited to powers of two",
            found.sentence,
            self._time_axis(),
            self._accuracy_axis(),
            tuple(layers),
        )

    def curves_figure(self) -> Figure:
        """Accuracy during training."""
        front, members = self.front, {trial.number for trial in self.front.trials}
        by_number = {r.number: r for r in self.study.records}
        layers: list[Layer] = []
        for on_front in (False, True):
            for trial, curve in self.curves.items():
                record = by_number.get(trial)
                if record is None or not curve or (trial in members) != on_front:
                    continue
                budget, train_s = record.facts.samples_budget, front.taken(record)
                if not budget or not _finite(train_s):
                    continue
                ended_early: dict[str, Tone] = {"stopped": "stopped", "paused": "paused"}
                tone: Tone = "front" if on_front else ended_early.get(record.outcome, "other")
                layers.append(
                    Layer(
                        f"trial {trial}",
                        "line",
                        tone,
                        tuple(seen / budget * float(train_s or 0.0) for seen, _ in curve),
                        tuple(accuracy for _, accuracy in curve),
                        trials=(trial,) * len(curve),
                        labels=(self.label(record),) * len(curve),
                    )
                )
        return Figure(
            "learning-curves",
            "Learning curves",
            "Each trial's evaluations over its training time; trials on the front are highlighted.",
            self._time_axis(),
            self._accuracy_axis(),
            tuple(layers),
        )


_BATCH = Axis("effective_batch", "effective batch (samples of one optimizer step)", log=True)
_OWN_FIGURES = frozenset({"effective_batch", "reference_rate", "accumulation", "devices"})
_LABELLED = frozenset({"effective_batch", "reference_rate", "rule", "accumulation", "devices"})
_FAILED_TONES: dict[str, Tone] = {"diverged": "diverged", "infeasible": "infeasible", "error": "failed"}


def _around(values: Iterable[float]) -> tuple[float, float] | None:
    """Ends of a log axis that shows these values, with some room; None without any."""
    known = [value for value in values if value > 0]
    return (min(known) / 1.5, max(known) * 1.5) if known else None


def _placed(value: Any, choices: Sequence[Any]) -> bool:
    """Whether a parameter's value has a place on an axis: it is among the choices, or a number where there are none."""
    return value in choices if choices else _finite(value)


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _plan_label(values: Mapping[str, Any]) -> str:
    """A batch's plan, in brackets."""
    if "micro_batch" not in values:
        return ""
    devices, accumulation = int(values.get("devices", 1)), int(values.get("accumulation", 1))
    parts = [f"micro-batch {values['micro_batch']}"]
    parts += [f"accumulation {accumulation}"] * (accumulation > 1) + [f"{devices} devices"] * (devices > 1)
    if mode := values.get("activation_checkpointing"):
        parts.append(f"{mode} activation checkpointing")
    return f" ({', '.join(parts)})"


def _seconds_per_thousand(record: TrialRecord) -> float | None:
    budget = record.facts.samples_budget
    return None if not budget or record.train_s is None else record.train_s / budget * 1000


def _between(low: int, high: int, most: int = 60) -> list[int]:
    """Sizes from low to high, evenly spaced on a log scale."""
    return sorted({round(low * (high / low) ** (part / (most - 1))) for part in range(most)})
