"""What is said of a study's trials and its front, a sentence each: on the terminal, on the page, and in notes."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress

from ...spaces.domain import Choices, Domain, Range, values_of
from ...spaces.errors import StorageError
from ...spaces.front import ParetoFront
from ...spaces.laws.examination import overall
from ...spaces.readable import number, plural
from ...spaces.record import TrialRecord
from ...spaces.study.space import LENGTHS
from ..analysis.choice import NEARLY_BEST, below, chance_to_reach, fastest_within, settings_reaching
from ..analysis.confirm import CONFIDENCE, FOR_REPEATS, averaged
from ..analysis.rates import BestRates, Estimate
from ..run.profiles import stored_profiles
from ..store.stored import StoredStudy, codes
from .columns import IN_COLUMNS
from .track_record import record_sentences, settled_predictions


def front_summary(study: StoredStudy) -> Iterator[str]:
    """The sentences under a study's front; one on the best rates only where a current fit is stored."""
    spec, front, records = study.spec, study.front, study.records
    # A setting that was repeated is compared by its mean.
    settings = {record.number: record for record in records}
    settings |= {record.number: record for record in averaged(records, spec.objectives)}
    sentences = (
        *inexact_sentences(study),
        confirm_sentence(front, spec.confirm),
        floor_sentence(study),
        best_sentence(front, alike=spec.trains_equally_long),
        step_sentence(front),
        *comparison(front, settings.values()),
        *record_sentences(records, settled_predictions(study)),
        spent_sentence(study),
        *edge_sentences(front, spec.searched()),
        rule_sentence(study),
        batch_norm_sentence(front),
        undefined_sentence(records),
        code_sentence(study),
    )
    yield from filter(None, sentences)


def outcome_counts(records: Iterable[TrialRecord]) -> str:
    """How many trials ended in which way.

    >>> print(outcome_counts([TrialRecord(0, "out_of_memory", {}), TrialRecord(8, "complete", {})]))
    1 complete, 1 out of memory
    """
    return outcome_words(Counter(record.outcome for record in records))


def outcome_words(counts: Mapping[str, int]) -> str:
    """Numbers of trials by outcome, as a list."""
    return ", ".join(f"{count} {outcome.replace('_', ' ')}" for outcome, count in sorted(counts.items()))


def setting_words(record: TrialRecord) -> list[str]:
    """A trial's settings, a phrase each.

    >>> from bsearch.spaces.record import TrialFacts
    >>> facts = TrialFacts(learning_rate=0.1, repeats=0)
    >>> setting_words(TrialRecord(1, "complete", {"effective_batch": 500, "width": 8}, facts))
    ['batch 500', 'rate 0.1', 'width 8', 'repeats trial 0']
    """
    values = record.settings
    rule = f" ({values['rule']})" if "rule" in values else ""
    named = {"batch": "effective_batch", "rate": "learning_rate", "epochs": "epochs"}
    words = [
        f"{word} {number(values[name])}{rule * (word == 'rate')}"
        for word, name in named.items()
        if name in values
    ]
    further = (
        name for name, value in record.parameters.items() if name not in IN_COLUMNS and value is not None
    )
    words += [f"{name} {number(record.parameters[name])}" for name in further]
    return [*words, *([f"repeats trial {record.facts.repeats}"] if record.is_repeat else [])]


def confirm_sentence(front: ParetoFront, repeats: int) -> str | None:
    """How to read the confidence columns, and how many repeats are missing; None where no setting was repeated."""
    if not any(trial.interval is not None for trial in front.trials):
        return None
    left = sum((trial.facts.runs or 1) + (trial.facts.failed_runs or 0) <= repeats for trial in front.trials)
    missing = (
        f" {left} members still have fewer than {repeats} repeats: raise budget.trials, whose last "
        f"{FOR_REPEATS:.0%} are reserved for repeats."
        if left
        else ""
    )
    return (
        f"{front.metric} is the mean over seeds, +/- half the width of its {CONFIDENCE:.0%} interval; first runs are corrected "
        f"for selection bias, estimated from the repeats; on front: the probability that no equally fast or faster setting is "
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
    chance = chance_to_reach(first, target)
    sure = "a single run" if chance is None else f"its mean does so with probability {chance:.0%}"
    return (
        f"{begin}: trial {first.number} is the {front.fastest} to reach it, {front.takes(first)} ({sure}); "
        f"{len(reaching)} of {trained} settings reach it."
    )


def floor_sentence(study: StoredStudy) -> str | None:
    """Which setting is the fastest to reach the study's floor, and that the front leaves out what does not."""
    metric = study.spec.objectives.metric
    if metric.floor is None:
        return None
    reached = any(
        trial.score is not None and trial.score >= metric.least_score for trial in study.front.trials
    )
    shown = (
        "The front leaves out the others (objectives.metric.floor)"
        if reached
        else "Until one does, the search and the front ignore objectives.metric.floor"
    )
    return f"{target_sentence(study, metric.floor)} {shown}."


def best_sentence(front: ParetoFront, *, alike: bool = False) -> str | None:
    """The best member, and the fastest that is nearly as good, in a sentence; where all take alike, the best alone."""
    best = front.best
    if best is None:
        return None
    nearly = fastest_within(front, NEARLY_BEST)
    sentence = f"Best {front.metric}: {number(best.accuracy)} {front.takes(best)} (trial {best.number})."
    if alike:
        return sentence
    if nearly.number == best.number:
        return f"{sentence} No {front.faster} trial comes within {100 * NEARLY_BEST:.0f} % of it."
    return (
        f"{sentence} {front.fastest.capitalize()} within {100 * NEARLY_BEST:.0f} % of it: trial {nearly.number}, "
        f"{number(nearly.accuracy)} {front.takes(nearly)}."
    )


def step_sentence(front: ParetoFront) -> str | None:
    """What the next faster member would save and cost, in a sentence; None where there is none."""
    nearly = fastest_within(front, NEARLY_BEST) if front.trials else None
    faster = [
        trial
        for trial in front.trials
        if nearly and (front.taken(trial) or 0.0) < (front.taken(nearly) or 0.0)
    ]
    if nearly is None or not faster or nearly.accuracy is None or faster[-1].accuracy is None:
        return None
    next_s, near_s = front.taken(faster[-1]) or 0.0, front.taken(nearly) or 0.0
    return (
        f"The next {front.faster} one, trial {faster[-1].number}, takes {1 - next_s / near_s:.0%} less {front.noun}, with "
        f"{front.metric} {number(faster[-1].accuracy)} ({faster[-1].accuracy - nearly.accuracy:+.3g})."
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
        faster = next((trial for trial in front.trials if front.reaches(trial, setting.accuracy)), None)
        better = front.within(setting_s).best
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
        if better.accuracy is not None and (better.number != faster.number or not parts):
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

    >>> at = {"width": 8, "dropout": 0.0}
    >>> trials = tuple(TrialRecord(number, "complete", at, train_s=1.0 + number, accuracy=0.5) for number in range(4))
    >>> print(*edge_sentences(ParetoFront(trials), {"width": Range(low=8, high=64), "dropout": Range(low=0.0, high=0.5)}))
    4 of the front's 4 trials are at the lower edge of width, 8: a wider range may hold better settings; widening it keeps \
these trials.
    """
    for name, domain in searched.items():
        if not isinstance(domain, Range) or name in LENGTHS:  # the front spans those by itself
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
                grows = not (
                    domain.step or domain.changes_cost or (name == "effective_batch" and word == "upper")
                )
                trials = (
                    "; widening it keeps these trials"
                    if grows
                    else ", in a study of another name (warm_start: this one)"
                )
                yield (
                    f"{count} of the front's {len(front.trials)} trials are at the {word} edge of {name}, {number(end)}: "
                    f"a wider range may hold better settings{trials}."
                )


def failed_values(records: Sequence[TrialRecord], searched: Mapping[str, Domain]) -> Iterator[str]:
    """The choices, such as a rule, whose trials have all failed, so that nothing is known of them.

    >>> records = [TrialRecord(n, "error" if n % 2 else "complete", {"rule": "sqrt" if n % 2 else "linear"}) for n in range(6)]
    >>> print(*failed_values(records, {"rule": Choices(choices=("linear", "sqrt"))}))
    rule sqrt: all 3 trials failed, so it is not compared.
    """
    for name, domain in searched.items():
        for value in values_of(domain) if isinstance(domain, Choices) else ():
            outcomes = [record.outcome for record in records if record.parameters.get(name) == value]
            if len(outcomes) > 1 and set(outcomes) == {"error"}:
                yield f"{name} {value}: all {len(outcomes)} trials failed, so it is not compared."


def rule_sentence(study: StoredStudy) -> str | None:
    """The same as a whole sentence; None where there is no current fit, or the trials do not determine one."""
    stored = study.current_rates()
    if stored is None or stored.rates is None:
        return None
    found = stored.rates
    return f"Best rate against batch: {rule_verdict(found)}"


def rule_verdict(found: BestRates) -> str:
    """Which rules the trials are consistent with: a sentence without its beginning."""

    def estimate(fitted: Estimate) -> str:
        return f"{fitted.value:.2f} [{fitted.low:.2f}, {fitted.high:.2f}]"

    exponent = f"exponent {estimate(found.exponent)}"
    holding, failing = (
        [rule for rule, holds in found.holds.items() if holds is which] for which in (True, False)
    )
    if not failing:
        ends = f"{found.rates[0].effective_batch} and {found.rates[-1].effective_batch}"
        return f"the data do not distinguish the rules: {exponent}. More trials near batches {ends}, at many rates, would help."
    if not found.trusted:
        return (
            f"{exponent}, but for most batches the best rate lies at the edge of the rates tried, so no rule can be excluded. "
            "Search a wider space.reference_rate, which keeps these trials."
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


def batch_norm_sentence(front: ParetoFront) -> str | None:
    """That BatchNorm saw less than the whole step in members of the front; None where it did not."""
    partial = [
        trial
        for trial in front.trials
        if (trial.facts.ghost_batch or math.inf) < trial.settings["effective_batch"]
    ]
    if not partial:
        return None
    names = ", ".join(str(trial.number) for trial in partial)
    return (
        f"BatchNorm saw a micro-batch, not the whole step, in trial{'s' * (len(partial) > 1)} {names}: "
        "keep their micro-batch when you use their settings."
    )


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
    numbers = ", ".join(str(record.number) for record in undefined[:5]) + (
        ", ..." if len(undefined) > 5 else ""
    )
    return f"Undefined (NaN) in {plural(len(undefined), 'trial')} ({numbers}): {names}."


def inexact_sentences(study: StoredStudy) -> Iterator[str]:
    """What the examination found, where the study went on in spite of it."""
    if not study.spec.training.accept_inexact:
        return
    examination = None
    with suppress(StorageError), closing(study.tables()) as tables:
        examination = overall(profile.examination for profile in stored_profiles(study, tables).values())
    if examination is not None and examination.refusals:
        yield "Not exact (training.accept_inexact): trials or their scores depend on how batches are split."
        yield from (f"- {finding}" for finding in examination.refusals)


def code_sentence(study: StoredStudy) -> str | None:
    """That trials ran different code; None where all ran the same."""
    newest, *earlier = codes(study.identity)
    if not earlier:
        return None
    return (
        "The task's code changed during the study, which was resumed with --same-experiment: "
        f"{', '.join(reversed(earlier))}, now {newest}."
    )
