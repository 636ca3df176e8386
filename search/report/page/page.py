"""`bsearch report`: a study as one self-contained HTML file."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from ....spaces.boundary.distribution import installed_version
from ....spaces.domain import Choices
from ....spaces.errors import BsearchError, StudyFileError, plain
from ....spaces.front import ParetoFront
from ....spaces.laws.examination import overall
from ....spaces.readable import number, seconds
from ....spaces.record import TrialRecord
from ...analysis.choice import NEARLY_BEST, fastest_within
from ...analysis.confirm import averaged
from ...store.stored import StoredStudy
from ..columns import front_columns, trial_columns
from ..export import PLAN_COLUMNS, csv_text, trial_document
from ..frameworks import FRAMEWORKS
from ..frameworks.settings import chosen_settings
from ..sentences import front_summary, outcome_counts
from ..stdio.console import json_text
from ..terminal.deadline import deadline_sentence
from .decide import decision_data
from .draw import LOOKS, plotly_document
from .figure import Figure
from .figures import figures_of
from .study_data import StudyData

_MOST_ROWS = 2000  # of all trials; the CSV has all of them
# Choices in the front's figure: Okabe and Ito's colours, which colour-blind readers can distinguish, and symbols.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "pentagon", "cross", "star")


def picks(
    front: ParetoFront, target: float | None = None, baseline_s: float | None = None
) -> list[tuple[str, TrialRecord]]:
    """The trials that most users look for, each by what it is: what is nearly as good as the best, what reaches a target, the
    best that the baseline's time allows, and the best.
    """
    best = front.best
    if best is None:
        return []
    near, fastest = fastest_within(front, NEARLY_BEST), front.fastest.capitalize()
    named = {
        f"{fastest} within {NEARLY_BEST:.0%} of the best": None if near.number == best.number else near,
        f"{fastest} to reach {number(target)}": next(
            (trial for trial in front.trials if target is not None and front.reaches(trial, target)), None
        ),
        f"Best in the baseline's {front.noun}": None if baseline_s is None else front.within(baseline_s).best,
        "Best": best,
    }
    chosen: dict[int, tuple[str, TrialRecord]] = {}
    for name, trial in named.items():
        if trial is not None:
            chosen.setdefault(trial.number, (name, trial))
    return list(chosen.values())


_ENTERED = (*PLAN_COLUMNS, "weight_decay", "optimizer", "epochs", "samples_budget", "steps", "seed")
_DERIVED = frozenset({*_ENTERED, "reference_rate", "exponent", "noise_batch"})


def _settings(record: TrialRecord) -> list[tuple[str, str]]:
    """The settings to enter into a trainer, by the study's names."""
    values = record.settings
    names = [*(name for name in _ENTERED if name in values), *sorted(record.parameters.keys() - _DERIVED)]
    return [
        (name, f"{values[name]:.6g}" if isinstance(values[name], float) else str(values[name]))
        for name in names
    ]


def report_page(drawn: StudyData) -> str:
    """The page of a study as HTML, including all scripts, styles and data."""
    study, front, figures = drawn.study, drawn.front, figures_of(drawn)
    settings = {record.number: record for record in study.records}
    settings |= {record.number: record for record in averaged(study.records, study.spec.objectives)}
    settings |= {trial.number: trial for trial in front.trials}
    colourings = _colourings(study, settings)
    columns, every = front_columns(front), trial_columns(study.records[:_MOST_ROWS], front)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__name__.rpartition(".")[0]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        version=installed_version(),
        study=study,
        front=front,
        headings=[column.name.replace("\n", " ") for column in columns],
        rows=list(zip(*(column.cells for column in columns), strict=True)),
        every_heading=[column.name.replace("\n", " ") or "notes" for column in every],
        every=list(zip(*(column.cells for column in every), strict=True)),
        colourings=list(colourings),
        outcomes=outcome_counts(study.records),
        picks=[
            {"name": name, "number": trial.number, "result": f"{number(trial.accuracy)} {front.takes(trial)}"}
            for name, trial in picks(
                front,
                study.spec.objectives.metric.floor,
                next((front.taken(trial) for trial in drawn.baseline), None),
            )
        ],
        summary=[plain(sentence) for sentence in _summary(drawn)],
        figures=figures,
        driven=seconds(study.driver_s),
        frameworks=list(FRAMEWORKS),
        data=_script_json(_data(drawn, figures, settings, colourings)),
        plotly=base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode(),
    )


def _data(
    drawn: StudyData,
    figures: list[Figure],
    settings: Mapping[int, TrialRecord],
    colourings: Mapping[str, Any],
) -> dict[str, Any]:
    """What the page's scripts read.

    Args:
        settings: trials by number, those that stand for repeated settings with their means.
    """
    study, front = drawn.study, drawn.front
    trials = csv_text([trial_document(record, front) for record in study.records])
    setups = study.tables().setups(study.name)  # not of those that were trained outside `bsearch run`
    return {
        "figures": [plotly_document(figure) for figure in figures],
        "csv": {figure.name: csv_text(figure.rows()) for figure in figures} | {"trials": trials},
        "tones": {tone: {"light": style.light, "dark": style.dark} for tone, style in LOOKS.items()},
        "trials": {trial: _picked(record, front) for trial, record in settings.items()},
        "exports": {
            trial.number: _exports(study, trial) if trial.number in setups else {} for trial in front.trials
        },
        "decide": decision_data(front, settings, drawn.curves),
        "colourings": colourings,
        "coloured": next((name for name, colouring in colourings.items() if colouring["choices"]), ""),
        "palette": PALETTE,
        "symbols": SYMBOLS,
        "first": fastest_within(front, NEARLY_BEST).number if front.trials else None,
    }


def _colourings(study: StoredStudy, settings: Mapping[int, TrialRecord]) -> dict[str, dict[str, Any]]:
    """By what points can be coloured: each searched parameter, its value in each trial, and its choices or its scale."""
    named = {}
    for name, domain in study.spec.searched().items():
        shown = "learning_rate" if name == "reference_rate" else name  # after the rule, as trained
        values = {
            number: {**record.settings, **record.parameters}.get(shown) for number, record in settings.items()
        }
        choices = list(domain.choices) if isinstance(domain, Choices) else None
        named[shown] = {"values": values, "choices": choices, "log": bool(getattr(domain, "log", False))}
    return named


def _summary(drawn: StudyData) -> Iterator[str]:
    """The sentences that `show` prints, and how the task was examined."""
    if plan := deadline_sentence(drawn.study.deadline):
        yield plan
    yield from front_summary(drawn.study)
    if (examination := overall(profile.examination for profile in drawn.profiles.values())) is not None:
        yield f"{examination.sentence[0].upper()}{examination.sentence[1:]}."


def _picked(record: TrialRecord, front: ParetoFront) -> dict[str, Any]:
    """What the picker shows of a trial."""
    settings = _settings(record)
    return {
        "number": record.number,
        "outcome": record.outcome,
        "time": front.amount(record),
        "accuracy": number(record.accuracy),
        "message": plain(record.message),
        "settings": settings,
        "yaml": "".join(f"{name}: {value}\n" for name, value in settings),
    }


def _exports(study: StoredStudy, record: TrialRecord) -> dict[str, dict[str, Any]]:
    """A trial's settings for every framework that can express them."""
    exports: dict[str, dict[str, Any]] = {}
    with suppress(StudyFileError):
        settings = chosen_settings(study, record, "chosen in the report")
        for name, write in FRAMEWORKS.items():
            with suppress(BsearchError):
                exported = write(settings)
                exports[name] = {"text": exported.text, "notes": list(exported.notes)}
    return exports


def _script_json(data: Mapping[str, Any]) -> Markup:
    """JSON that is safe inside a script element, whatever strings it holds."""
    text = json_text(data, indent=None)
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return Markup(text)  # noqa: S704 - contains no <
