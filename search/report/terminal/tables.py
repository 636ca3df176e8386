"""A study's results for the terminal: sentences, tables and plots."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Literal

from rich.table import Table

from ....spaces.domain import Domain, Range
from ....spaces.front import ParetoFront
from ....spaces.laws.examination import overall
from ....spaces.readable import number
from ....spaces.record import TrialRecord
from ...analysis.choice import below, chance_to_reach, settings_reaching
from ...analysis.confirm import CONFIDENCE, averaged
from ...analysis.pareto import no_slower, no_worse
from ...analysis.rates import BestRates, Estimate
from ...run.profiles import stored_profiles
from ...store.stored import StoredStudy, codes
from .plot import scatter


def front_table(front: ParetoFront, most: int | None = None, target: float | None = None) -> Table:
    """The front, fastest first, with the settings that give each point.

    Args:
        target: show the probability that a setting reaches it instead of the probability that it is on the front.
    """
    trials = front.trials if most is None else front.trials[:most]
    searched = _others_searched(trials)
    table = Table(box=None, header_style="bold", pad_edge=False)
    repeated = any(trial.interval is not None for trial in trials)
    # Columns of confidence replace those that `show --pick` shows as well, so that lines fit a terminal.
    confidences = ("+/-", "runs", "on\nfront" if target is None else "reaches") if repeated else ()
    several_rules = len({(trial.facts.rule or trial.parameters.get("rule")) for trial in trials}) > 1
    shown = [name for name in _SHOWN if not repeated or name != "rule" or several_rules]
    made = () if repeated else ("micro\nx acc.",)
    for name in ("trial", *front.speeds, front.metric, *confidences, *shown, *made, *searched, ""):
        column(table, name, "left" if name == "rule" else "right")
    for trial in trials:
        values = trial.settings
        micro_batches = f"{values.get('micro_batch', '?')} x {values.get('accumulation', '?')}"
        confidence: tuple[str, ...] = ()
        if repeated:
            facts = trial.facts
            chance = facts.front_probability if target is None else chance_to_reach(trial, target, front.direction)
            confidence = f"{trial.half_interval or 0.0:.2g}", str(facts.runs), f"{chance or 0.0:.0%}"
        marks = [word for word, holds in (("knee", trial.number == front.knee), ("baseline", trial.is_baseline)) if holds]
        if failed := trial.facts.failed_runs:
            marks.append(f"{failed} failed")
        # The fastest member that it is not significantly better than.
        if ties := [other.number for other in trials if other.number in (trial.facts.ties or ())]:
            marks.append(f"= {ties[0]}")
        table.add_row(
            str(trial.number),
            *(number(trial.taken(speed)) for speed in front.speeds),
            number(trial.accuracy),
            *confidence,
            *(number(values.get(name)) for name in shown),
            *(() if repeated else (micro_batches,)),
            *(number(values.get(name)) for name in searched),
            " ".join(marks),
        )
    return table


def _others_searched(trials: Iterable[TrialRecord]) -> list[str]:
    """Searched parameters that are no column of their own kind."""
    return sorted({name for trial in trials for name in trial.parameters} - {*_SHOWN, "accumulation", "reference_rate"})


def column(table: Table, name: str, justify: Literal["left", "right"] = "right") -> None:
    """Long names go over two lines."""
    table.add_column(name.replace("_", "\n", 1) if len(name) > 8 else name, justify=justify, no_wrap=True, vertical="bottom")


_SHOWN = ("effective_batch", "learning_rate", "rule", "epochs")


def trials_table(records: Sequence[TrialRecord], front: ParetoFront) -> Table:
    """Every trial in order, with its outcome."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    searched = _others_searched(records)
    for name in ("trial", "outcome", *front.speeds, front.metric, *_SHOWN, *searched, ""):
        column(table, name, "left" if name in ("outcome", "rule", "") else "right")
    table.columns[-1].no_wrap = False  # where it is narrow, notes take more lines before numbers are cut
    members = {trial.number for trial in front.trials}
    for record in records:
        values = record.settings
        notes = [record.message or ("front" if record.number in members else "")]
        if record.is_repeat:
            notes.append(f"repeats trial {record.facts.repeats} with seed {record.facts.seed}")
        if record.outcome == "interrupted" and not record.has_ended:
            notes.append("goes on with the next run")
        note = "; ".join(filter(None, notes))
        table.add_row(
            str(record.number),
            record.outcome,
            *(number(record.taken(speed)) for speed in front.speeds),
            number(record.accuracy),
            *(number(values.get(name)) for name in (*_SHOWN, *searched)),
            note.splitlines()[0] if note else "",
        )
    return table


def trial_parts(document: Mapping[str, Any], record: TrialRecord, metric: str) -> Iterator[str | Table]:
    """What `bsearch show --pick` prints: every value, and what was measured while it trained.

    Args:
        document: of `trial_document`, with its `curve`.
    """
    if record.outcome == "stopped":
        yield "Stopped early: train_s, device_s and cost are for the full budget."
    if record.outcome == "paused":
        yield "Paused: accuracy is as of the pause; train_s, device_s and cost are for the full budget."
    values = Table(box=None, show_header=False, pad_edge=False)
    for name, value in document.items():
        if name not in ("curve", "attempts"):
            values.add_row(name, number(value))
    yield values
    if not document["curve"]:
        return
    curve = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("attempt", "samples\nseen", "seconds by\nthe clock", metric, "training\nloss"):
        column(curve, name)
    for point in document["curve"]:
        names = ("attempt", "samples_seen", "elapsed_s", "accuracy", "train_loss")
        curve.add_row(*(number(point[name]) for name in names))
    yield curve


def outcome_counts(records: Iterable[TrialRecord]) -> str:
    """How many trials ended in which way.

    >>> print(outcome_counts([TrialRecord(0, "out_of_memory", {}), TrialRecord(8, "complete", {})]))
    1 complete, 1 out of memory
    """
    counts = sorted(Counter(record.outcome for record in records).items())
    return ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in counts)


def front_plot(front: ParetoFront, records: Iterable[TrialRecord], width: int, height: int = 16) -> str:
    """Accuracy over seconds as text, without colour: o the front, * the baseline, . other trials."""
    complete = [
        record for record in records if record.outcome == "complete" and front.taken(record) and record.accuracy is not None
    ]
    # A single diverged loss would flatten all others.
    levels = [trial.accuracy for trial in front.trials if trial.accuracy is not None]
    if len(levels) > 1:
        reach = 3 * (max(levels) - min(levels))
        near = (min(levels) - reach, max(levels) + reach)
        complete = [record for record in complete if near[0] <= (record.accuracy or 0.0) <= near[1]]
    if len(complete) < 2:
        return ""
    members = {trial.number for trial in front.trials}
    groups = {
        ".": [record for record in complete if record.number not in members],
        "o": [record for record in complete if record.number in members],
        "*": [record for record in complete if record.is_baseline],
    }
    return scatter(
        {
            marker: [(front.taken(record) or 1.0, record.accuracy or 0.0) for record in group]
            for marker, group in groups.items()
        },
        width=width,
        height=height,
        x_label=f"{front.speed} (o front, * baseline)",
        y_label=front.metric,
        log=True,
    )


def front_summary(study: StoredStudy) -> Iterator[str]:
    """The sentences under a study's front; one on the best rates only where a current fit is stored."""
    spec, front, records = study.spec, study.front, study.records
    # A setting that was repeated is compared by its mean.
    settings = {record.number: record for record in records}
    settings |= {record.number: record for record in averaged(records, spec.objectives)}
    sentences = (
        *inexact_sentences(study),
        confirm_sentence(front, spec.confirm.repeats),
        target_sentence(study, spec.target) if spec.target is not None else None,
        knee_sentence(front),
        *comparison(front, settings.values()),
        contention_sentence(records),
        spent_sentence(study),
        *edge_sentences(front, spec.searched()),
        rule_sentence(study),
        noise_scale_sentence(records),
        undefined_sentence(records),
        code_sentence(study),
    )
    yield from filter(None, sentences)


def inexact_sentences(study: StoredStudy) -> Iterator[str]:
    """What the examination found, where the study went on in spite of it."""
    if not study.spec.training.accept_inexact:
        return
    examination = overall(profile.examination for profile in stored_profiles(study, study.tables()).values())
    if examination is not None and examination.refusals:
        yield "Not exact (training.accept_inexact): trials or their scores depend on how batches are split."
        yield from (f"- {finding}" for finding in examination.refusals)


def undefined_sentence(records: Sequence[TrialRecord]) -> str | None:
    """Metrics other than the study's own that were NaN in some trial.

    >>> from bsearch.spaces.record import TrialFacts
    >>> trials = [TrialRecord(number, "complete", {}, TrialFacts(extra={"undefined": "f1"})) for number in (2, 5)]
    >>> undefined_sentence(trials)
    'Undefined (NaN) in 2 trials (2, 5): f1.'
    """
    undefined = [record for record in records if record.facts.extra.get("undefined")]
    if not undefined:
        return None
    names = ", ".join(dict.fromkeys(str(record.facts.extra["undefined"]) for record in undefined))
    numbers = ", ".join(str(record.number) for record in undefined[:5]) + (", ..." if len(undefined) > 5 else "")
    trials = f"{len(undefined)} trial{'s' * (len(undefined) > 1)}"
    return f"Undefined (NaN) in {trials} ({numbers}): {names}."


# Bounds beyond which a parameter means nothing, by the end of its name.
_NATURAL: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(("dropout", "momentum", "smoothing", "beta1", "beta2", "ema", "warmup"), (0.0, 1.0)),
    **dict.fromkeys(("weight_decay", "wd", "l1", "l2"), (0.0, math.inf)),
    **dict.fromkeys(("effective_batch", "accumulation", "layers", "depth", "width"), (1.0, math.inf)),
}
# Members of a front this near to an end of a range, as a share of it on the search's scale, are at its edge.
_EDGE = 0.02


def edge_sentences(front: ParetoFront, searched: Mapping[str, Domain]) -> Iterator[str]:
    """The ranges at whose edge most of the front lies, a sentence each; a wider range may hold better settings.

    Not of a range that cannot be wider, such as of dropouts from 0.

    >>> from bsearch.spaces.domain import Range
    >>> at = {"width": 8, "dropout": 0.0}
    >>> trials = tuple(TrialRecord(number, "complete", at, train_s=1.0 + number, accuracy=0.5) for number in range(4))
    >>> print(*edge_sentences(ParetoFront(trials), {"width": Range(low=8, high=64), "dropout": Range(low=0.0, high=0.5)}))
    4 of the front's 4 trials are at the lower edge of width, 8: a wider range may hold better settings.
    """
    for name, domain in searched.items():
        if not isinstance(domain, Range) or name == "epochs":  # the front spans those by itself
            continue
        of_trials = [trial.parameters.get(name) for trial in front.trials]
        values = [float(value) for value in of_trials if isinstance(value, int | float)]
        scale = math.log if domain.log else float
        low, high = scale(domain.low), scale(domain.high)
        places = [(scale(value) - low) / (high - low) for value in values]
        bounds = next((ends for known, ends in _NATURAL.items() if re.search(rf"(^|_){known}$", name)), ())
        for edge, word, end in ((0.0, "lower", domain.low), (1.0, "upper", domain.high)):
            if end in bounds:
                continue
            count = sum(abs(place - edge) <= _EDGE for place in places)
            if count >= max(3, (len(front.trials) + 1) // 2):
                yield (
                    f"{count} of the front's {len(front.trials)} trials are at the {word} edge of {name}, {number(end)}: "
                    "a wider range may hold better settings."
                )


def code_sentence(study: StoredStudy) -> str | None:
    """That trials ran different code; None where all ran the same."""
    newest, *earlier = codes(study.identity)
    if not earlier:
        return None
    return (
        "The task's code changed during the study, which was resumed with --same-experiment: "
        f"{', '.join(reversed(earlier))}, now {newest}."
    )


def confirm_sentence(front: ParetoFront, repeats: int) -> str | None:
    """How to read the confidence columns, and how many repeats are missing; None where no setting was repeated."""
    if not any(trial.interval is not None for trial in front.trials):
        return None
    left = sum((trial.facts.runs or 1) + (trial.facts.failed_runs or 0) <= repeats for trial in front.trials)
    missing = (
        f" {left} members still have fewer than {repeats} repeats: raise budget.trials; its last part "
        "(confirm.share) is reserved for repeats."
        if left
        else ""
    )
    rival = "no setting that takes no more by either measure" if front.second_speed else "no equally fast or faster setting"
    return (
        f"{front.metric} is the mean over seeds, +/- half the width of its {CONFIDENCE:.0%} interval; first runs are corrected "
        f"for selection bias, estimated from the repeats; on front: the probability that {rival} is "
        "better; = N: tied with the faster trial N." + missing
    )


def target_sentence(study: StoredStudy, target: float) -> str:
    """Which setting is the fastest to reach a target, and how many do."""
    front, settings = study.front, averaged(study.records, study.spec.objectives)
    trained = sum(setting.outcome == "complete" for setting in settings)
    reaching = settings_reaching(front, settings, target).trials
    begin = f"Target {front.metric} {target:.12g}"
    if not reaching:
        best = f"; the best has {below(front.best, target)}" if front.best else ""
        return f"{begin}: no setting of {trained} reaches it{best}."
    first = reaching[0]
    chance = chance_to_reach(first, target, front.direction)
    sure = "a single run" if chance is None else f"its mean does so with probability {chance:.0%}"
    return (
        f"{begin}: trial {first.number} is the {front.fastest} to reach it, {front.takes(first)} ({sure}); "
        f"{len(reaching)} of {trained} settings reach it."
    )


def knee_sentence(front: ParetoFront) -> str | None:
    """The point where the front bends, in a sentence."""
    trial = next((trial for trial in front.trials if trial.number == front.knee), None)
    if trial is None:
        return None
    fastest, best = front.trials[0], front.best
    assert best is not None
    trial_s, best_s = front.taken(trial), front.taken(best)
    assert trial_s is not None and best_s is not None
    return (
        f"Knee: trial {trial.number}, {front.metric} {number(trial.accuracy)} {front.takes(trial)}: "
        f"{1 - trial_s / best_s:.0%} {front.less} than the best ({number(best.accuracy)} {front.takes(best)}); "
        f"the {front.fastest} is {front.amount(fastest)} with {number(fastest.accuracy)}."
    )


def comparison(front: ParetoFront, records: Iterable[TrialRecord]) -> Iterator[str]:
    """How the front compares with the baseline, a sentence per setting under `baseline:`."""
    for setting in records:
        if not setting.is_baseline:
            continue
        where = f"Baseline (trial {setting.number}"
        setting_s = front.taken(setting)
        if setting.outcome != "complete" or setting_s is None or setting.accuracy is None:
            yield f"{where}): {setting.outcome}, so there is nothing to compare with."
            continue
        where += f": {front.metric} {number(setting.accuracy)} {front.takes(setting)})"
        faster, better = no_worse(front, setting), no_slower(front, setting)
        if faster is None or better is None or faster.number == better.number == setting.number:
            yield f"{where} is on the front: no trial beat it."
            continue
        parts = []
        faster_s = front.taken(faster)
        if faster_s is not None and faster_s < setting_s:
            change = faster_s / setting_s - 1
            parts.append(
                f"trial {faster.number} has at least its {front.metric} ({number(faster.accuracy)}) "
                f"{front.takes(faster)} ({change:+.0%} {front.noun})"
            )
        if better.number != faster.number and better.accuracy is not None:
            change = better.accuracy - setting.accuracy
            result = f"{front.metric} {number(better.accuracy)} ({change:+.3g})"
            parts.append(f"trial {better.number} has {result} in its {front.noun} or less")
        yield f"{where} -> {'; '.join(parts)}."


def spent_sentence(study: StoredStudy) -> str | None:
    """What the study's trials have cost, in a sentence; None without prices."""
    spent = [record.facts.spent for record in study.records if record.facts.spent is not None]
    if not spent:
        return None
    limit = study.spec.budget.cost
    of_budget = "" if limit is None else f", of a budget of {limit:g}"
    return f"At devices.prices the trials have cost {number(sum(spent))} so far{of_budget}, evaluations and restarts included."


def contention_sentence(records: Iterable[TrialRecord]) -> str | None:
    """How many trials shared their device with other programs, in a sentence; None if none did.

    >>> from dataclasses import replace
    >>> from bsearch.spaces.record import TrialFacts
    >>> facts = TrialFacts(train_s_error=0.3, contended=True, measured_train_s=13.0, waited_s=2.6)
    >>> print(contention_sentence([TrialRecord(0, "complete", {}, facts, train_s=10.0)]))
    1 of 1 trials shared their device: they waited for a core for 20 % of their training (median), while the driver, other \
trials or other programs ran. The front uses the predicted times, so it is not affected.
    >>> facts = replace(facts, others_share=0.45, stolen_share=0.22)
    >>> print(contention_sentence([TrialRecord(0, "complete", {}, facts, train_s=10.0)]))
    1 of 1 trials shared this machine: meanwhile other programs used 45 % of it and its host gave 22 % of its processor time \
to other virtual machines (median), and the trials took 30 % more time than predicted. The front uses the predicted times, so \
it is not affected.
    """
    counted = [record for record in records if record.counts and record.facts.train_s_error is not None]
    contended = [record for record in counted if record.facts.contended]
    if not contended:
        return None
    waits = [share for record in contended if (share := _waited_share(record)) is not None]
    who = f"{len(contended)} of {len(counted)} trials"
    unaffected = "The front uses the predicted times, so it is not affected."
    middle = 100 * median(record.facts.train_s_error or 0.0 for record in contended)
    used = [share for record in contended if (share := record.facts.others_share) is not None]
    if middle > 0 and (taken := _taken_words(contended)):
        machine = "this" if used else "their"
        return (
            f"{who} shared {machine} machine: meanwhile {taken} (median), and the trials took {middle:.0f} % more time than "
            f"predicted. {unaffected}"
        )
    if used and middle > 0:
        return (
            f"{who} took {middle:.0f} % more time than predicted (median), although other programs used little of this "
            "machine: training probably waits for something, such as input, that did not delay the steps that were timed. "
            f"{unaffected}"
        )
    if waits and median(waits) > _EXPLAINS:
        return (
            f"{who} shared their device: they waited for a core for {100 * median(waits):.0f} % of their training (median), "
            f"while the driver, other trials or other programs ran. {unaffected}"
        )
    if middle < 0:
        return (
            f"{who} took {-middle:.0f} % less time than predicted (median): steps were probably timed under load, so the "
            "predicted times are too long. Start a new study on an idle device."
        )
    return (
        f"{who} took {middle:.0f} % more time than predicted (median), probably because the driver, other trials or other "
        f"programs ran. {unaffected}"
    )


# Waiting for less than this share of the training explains no difference from the predicted time.
_EXPLAINS = 0.1


def _taken_words(contended: Iterable[TrialRecord]) -> str:
    """What took enough of the trials' machine to explain a delay, in the median of those that know it; empty if nothing did."""
    facts = [record.facts for record in contended]
    held_back = [fact.throttled_s / fact.measured_train_s for fact in facts if fact.throttled_s and fact.measured_train_s]
    causes: dict[str, Sequence[float | None]] = {
        "other programs used {:.0f} % of it": [fact.others_share for fact in facts],
        "its host gave {:.0f} % of its processor time to other virtual machines": [fact.stolen_share for fact in facts],
        "training waited for {:.0f} % of its time for the container's processor limit (cpu.max)": held_back,
    }
    shares = {words: median([share or 0.0 for share in found] or [0.0]) for words, found in causes.items()}
    return " and ".join(words.format(100 * share) for words, share in shares.items() if share >= _EXPLAINS)


def _waited_share(record: TrialRecord) -> float | None:
    waited_s, measured_s = record.facts.waited_s, record.facts.measured_train_s
    return None if waited_s is None or not measured_s else waited_s / measured_s


def noise_scale_sentence(records: Iterable[TrialRecord]) -> str | None:
    """The gradient noise scale that trials measured, in a sentence; None where none did.

    >>> from bsearch.spaces.record import TrialFacts
    >>> facts = TrialFacts(noise_scale=182.3, noise_scale_low=71.0, noise_scale_high=418.0)
    >>> print(noise_scale_sentence([TrialRecord(0, "complete", {}, facts)]))
    Gradient noise scale: about 182 samples (71 to 418 in 1 trial): batches far above it learn little more per step. A hint \
for effective_batch.high, not a law.
    """
    reported = [record.facts for record in records if record.counts and record.facts.noise_scale is not None]
    if not reported:
        return None
    # The median ends of the trials' own intervals describe the uncertainty of one trial; the extremes would grow with the
    # number of trials.
    about, low, high = (
        number(round(float(f"{median(float(getattr(facts, name)) for facts in reported):.3g}")))
        for name in ("noise_scale", "noise_scale_low", "noise_scale_high")
    )
    trials = "1 trial" if len(reported) == 1 else f"a trial, the median of {len(reported)}"
    return (
        f"Gradient noise scale: about {about} samples ({low} to {high} in {trials}): batches far above it learn little more "
        "per step. A hint for effective_batch.high, not a law."
    )


def rule_verdict(found: BestRates) -> str:
    """Which rules the trials are consistent with: a sentence without its beginning."""

    def estimate(fitted: Estimate) -> str:
        return f"{fitted.value:.2f} [{fitted.low:.2f}, {fitted.high:.2f}]"

    exponent = f"exponent {estimate(found.exponent)}"
    holding, failing = ([rule for rule, holds in found.holds.items() if holds is which] for which in (True, False))
    if not failing:
        ends = f"{found.rates[0].effective_batch} and {found.rates[-1].effective_batch}"
        return f"the data do not distinguish the rules: {exponent}. More trials near batches {ends}, at many rates, would help."
    if not found.trusted:
        return (
            f"{exponent}, but for most batches the best rate lies at the edge of the rates tried, so no rule can be excluded. "
            "Search a wider space.reference_rate (in a study of another name; warm_start: lets it learn from this one)."
        )
    if found.bend is not None:
        batch, below, above = found.bend
        rule = "surge" if above.high < 0 else "saturating"
        return (
            f"exponent {estimate(below)} up to batch {batch} and {estimate(above)} above: no power of the batch holds "
            f"throughout. Try rule: {rule}, and search noise_batch."
        )
    if not holding:
        return f"{exponent}: {_listed(failing)} do not hold. Write rule: power, exponent: {found.exponent.value:.2g}."
    return (
        f"{exponent}: {_listed(holding)} hold{'s' * (len(holding) == 1)}, "
        f"{_listed(failing)} do{'es' * (len(failing) == 1)} not."
    )


def _listed(items: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(items[:-1]), items[-1])))


def rule_sentence(study: StoredStudy) -> str | None:
    """The same as a whole sentence; None where there is no current fit, or the trials do not determine one."""
    stored = study.current_rates()
    if stored is None or stored.rates is None:
        return None
    found = stored.rates
    return f"Best rate against batch: {rule_verdict(found)}"
