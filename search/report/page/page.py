"""`bsearch report`: a study as one self-contained HTML file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from ....spaces.boundary.files import file_name, write_file
from ....spaces.domain import Choices
from ....spaces.errors import BsearchError, StudyFileError, plain
from ....spaces.front import ParetoFront, amount
from ....spaces.laws.examination import overall
from ....spaces.readable import number, seconds
from ....spaces.record import TrialRecord
from ....spaces.study.goals import Speed
from ...analysis.choice import NEARLY_BEST, fastest_within
from ...analysis.confirm import averaged
from ...store.stored import StoredStudy
from ...store.url import shown_url
from ..export import PLAN_COLUMNS, csv_text, study_document, trial_document
from ..frameworks import FRAMEWORKS
from ..frameworks.settings import chosen_settings
from ..sentences import front_summary
from ..terminal.deadline import plan_sentence
from .decide import decision_data
from .draw import LOOKS, picture, plotly_document
from .figure import Figure
from .figures import figures_of
from .study_data import StudyData

# What tells choices apart in the front's figure: Okabe and Ito's colours, which colour-blind readers tell apart, and symbols.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "pentagon", "cross", "star")


@dataclass(frozen=True, slots=True)
class Pick:
    """A trial that most users look for, and the name it is offered by."""

    name: str
    trial: TrialRecord
    description: str


def picks(front: ParetoFront, target: float | None = None) -> list[Pick]:
    """The fastest trial that reaches a target, the fastest that is nearly as good as the best, the knee and the best; each
    trial once, under its first name.
    """
    best = front.best
    if best is None:
        return []
    near = fastest_within(front, NEARLY_BEST)
    named = [
        (f"Nearly the best, {front.faster}", near, f"the {front.fastest} within {NEARLY_BEST:.0%} of the best {front.metric}"),
        (
            "Knee",
            next((trial for trial in front.trials if trial.number == front.knee), None),
            f"beyond it, more {front.noun} gains little",
        ),
        ("Best", best, f"the best {front.metric} found"),
    ]
    if near.number == best.number:
        named = [
            ("Best", best, f"the best {front.metric}; nothing {front.faster} comes within {NEARLY_BEST:.0%} of it"),
            named[1],
        ]
    if target is not None:
        reaching = next((trial for trial in front.trials if front.reaches(trial, target)), None)
        named.insert(
            0, ("Reaches the target", reaching, f"the {front.fastest} whose {front.metric} is {number(target)} or better")
        )
    chosen: dict[int, Pick] = {}
    for name, trial, description in named:
        if trial is not None and trial.number not in chosen:
            chosen[trial.number] = Pick(name, trial, description)
    return sorted(chosen.values(), key=lambda pick: front.taken(pick.trial) or 0.0)


def time_saving_sentences(front: ParetoFront) -> Iterator[str]:
    """What training in 1/2, 1/4, 1/8 or 1/16 of the best trial's time costs, one sentence each."""
    best = front.best
    if best is None or len(front.trials) < 2:
        return
    best_s = front.taken(best)
    assert best_s is not None and best.accuracy is not None
    listed: set[int] = {best.number}
    for part in (2, 4, 8, 16):
        trial = front.within(best_s / part).best
        if trial is None:
            return
        if trial.number in listed:
            continue
        listed.add(trial.number)
        assert trial.accuracy is not None
        yield (
            f"{_FOR.get(front.speed, 'In')} 1/{part} of the best trial's {front.noun} "
            f"({front.amount(trial)} instead of {front.amount(best)}): "
            f"{front.metric} {number(trial.accuracy)} instead of {number(best.accuracy)} (trial {trial.number})."
        )


_FOR: dict[Speed, str] = {"cost": "For", "energy_j": "With"}


def batch_norm_note(front: ParetoFront) -> str | None:
    """A note if BatchNorm saw less than the whole step; else None."""
    partial = [trial for trial in front.trials if (trial.facts.ghost_batch or math.inf) < trial.settings["effective_batch"]]
    if not partial:
        return None
    names = ", ".join(str(trial.number) for trial in partial)
    return (
        f"BatchNorm saw a micro-batch, not the whole step, in trial{'s' * (len(partial) > 1)} {names}: "
        "keep their micro-batch when you use their settings."
    )


def _settings(record: TrialRecord) -> list[tuple[str, str]]:
    """The settings to enter into a trainer, by the study's names."""
    values = record.settings
    names = [name for name in _ENTERED if name in values]
    names += sorted(name for name in record.parameters if name not in {*_ENTERED, "reference_rate", "exponent", "noise_batch"})
    return [(name, _exact(values[name])) for name in names]


_ENTERED = (*PLAN_COLUMNS, "weight_decay", "optimizer", "epochs", "samples_budget", "steps", "seed")


def _exact(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def report_page(drawn: StudyData) -> str:
    """The page of a study as HTML, including all scripts, styles and data."""
    study, figures = drawn.study, figures_of(drawn)
    front = study.front
    settings = {record.number: record for record in study.records}
    settings |= {record.number: record for record in averaged(study.records, study.spec.objectives)}
    settings |= {trial.number: trial for trial in front.trials}
    document = study_document(study.name, shown_url(study.url), front, study.records)
    rows = [trial_document(trial, front) for trial in front.trials]
    figure_rows = {figure.name: figure.rows() for figure in figures}
    chosen = picks(front, study.spec.target)
    colourings = _colourings(study, settings)
    setups = study.tables().setups(study.name)  # not of those that were trained outside `bsearch run`
    data = {
        "figures": [plotly_document(figure) for figure in figures],
        "csv": {name: csv_text(rows_of) for name, rows_of in figure_rows.items()} | {"trials": _trials_csv(study)},
        "tones": {tone: {"light": style.light, "dark": style.dark} for tone, style in LOOKS.items()},
        "trials": {trial: _picked(record, front) for trial, record in settings.items()},
        "exports": {trial.number: _exports(study, trial) if trial.number in setups else {} for trial in front.trials},
        "decide": decision_data(front, settings, drawn.curves),
        "colourings": colourings,
        "coloured": next((name for name, colouring in colourings.items() if colouring["choices"]), ""),
        "palette": PALETTE,
        "symbols": SYMBOLS,
        "first": fastest_within(front, NEARLY_BEST).number if chosen else None,
    }
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__name__.rpartition(".")[0]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        version=version("bsearch"),
        study=study,
        task=study.spec.task,
        front=front,
        rows=rows,
        colourings=list(colourings),
        parameters=sorted({name for row in rows for name in row} & set(study.spec.searched()) - _IN_TABLE),
        repeated=any(trial.interval is not None for trial in front.trials),
        outcomes=document["trials"],
        picks=[
            {
                "name": pick.name,
                "description": pick.description,
                "number": pick.trial.number,
                "time": front.amount(pick.trial),
                "accuracy": number(pick.trial.accuracy),
                "batch": pick.trial.settings.get("effective_batch"),
            }
            for pick in chosen
        ],
        summary=[plain(sentence) for sentence in _summary(drawn)],
        faster=list(time_saving_sentences(front)),
        figures=[
            {
                "figure": figure,
                "rows": figure_rows[figure.name][:_MOST_ROWS],
                "cut": len(figure_rows[figure.name]) > _MOST_ROWS,
            }
            for figure in figures
        ],
        number=number,
        amount=amount,
        driven=seconds(study.driver_s),
        frameworks=list(FRAMEWORKS),
        data=_script_json(data),
        plotly=Markup(get_plotlyjs()),  # noqa: S704 - Plotly's own script, from its package
    )


# Columns of the front's table in every study.
_IN_TABLE = {"effective_batch", "reference_rate", "rule", "accumulation", "epochs"}


def _colourings(study: StoredStudy, settings: Mapping[int, TrialRecord]) -> dict[str, dict[str, Any]]:
    """By what points can be coloured: each searched parameter, its value in each trial, and its choices or its scale."""
    named = {}
    for name, domain in study.spec.searched().items():
        shown = "learning_rate" if name == "reference_rate" else name  # after the rule, as trained
        values = {number: {**record.settings, **record.parameters}.get(shown) for number, record in settings.items()}
        choices = list(domain.choices) if isinstance(domain, Choices) else None
        named[shown] = {"values": values, "choices": choices, "log": bool(getattr(domain, "log", False))}
    return named


# Rows of a figure's data shown on the page; its CSV holds all.
_MOST_ROWS = 200


def _summary(drawn: StudyData) -> Iterator[str]:
    if plan := plan_sentence(drawn.study.deadline):
        yield plan
    yield from front_summary(drawn.study)
    note = batch_norm_note(drawn.study.front)
    if note:
        yield note
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


def _trials_csv(study: StoredStudy) -> str:
    return csv_text([trial_document(record, study.front) for record in study.records])


def _script_json(data: Mapping[str, Any]) -> Markup:
    """JSON that is safe inside a script element, whatever its strings contain."""
    text = json.dumps(_finite(data), allow_nan=False, default=_number)
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return Markup(text)  # noqa: S704 - contains no <


def _number(value: Any) -> Any:
    """NumPy numbers as Python numbers."""
    return value.item() if hasattr(value, "item") else str(value)


def _finite(value: Any) -> Any:
    """The same with NaN and infinities replaced by None, since JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(field) for key, field in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def write_figures(figures: Iterable[Figure], folder: Path) -> Iterator[Path]:
    """Write figures into a folder as NAME.png, NAME.svg and NAME.csv, and yield each file.

    Raises:
        OutputError: the folder cannot be written.
    """
    for figure in figures:
        name = file_name(figure.name)
        yield write_file(folder / f"{name}.png", picture(figure, "png"))
        yield write_file(folder / f"{name}.svg", picture(figure, "svg"))
        yield write_file(folder / f"{name}.csv", csv_text(figure.rows()))
