"""A source by its name: which reader it is for, and all of its runs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from ...spaces.boundary.files import foreign
from ...spaces.boundary.plug_ins import plug_in
from ...spaces.errors import Fault, StudyFileError, near_miss
from ...spaces.readable import plural
from .factors import with_devices_counted
from .names import Meaning
from .readers.tables import SUFFIXES
from .runs import Run, flat

_READERS = ("wandb", "mlflow", "optuna", "tensorboard", "trainer", "lightning", "tune")
# What a folder holds, at any depth, and the reader for it; the first that is found.
_HOLDS = (
    ("trainer", "trainer_state.json"),
    ("lightning", "hparams.yaml"),
    ("tune", "params.json"),
    ("wandb", "*.wandb"),
    ("tensorboard", "events.out.tfevents*"),
)
_GROUP = "bsearch.sources"
# Settings of a fit are many times fewer; the rest of a table is counted, and every so-manyth run kept.
MOST_RUNS = 20_000

Reader = Callable[[str], Iterator[Run]]


def runs_of(source: str, say: Callable[[str], None] = lambda text: None) -> list[Run]:
    """All runs of a source: a table, a folder, or `reader:what`, such as `wandb:entity/project`.

    Args:
        say: told every 100,000 runs, and where not all are kept.

    Raises:
        StudyFileError: no reader is for it, it cannot be read, or holds no runs.
    """
    left_out: dict[str, list[str]] = {}
    with foreign(source, "runs"):
        reader, rest = _reader(source)
        runs = _thinned(map(with_devices_counted, _only_runs(reader(rest), left_out)), say)
    for what, places in left_out.items():
        say(f"left out, since each is {what}: {plural(len(places), 'row')}, such as {places[0]}")
    for what in dict.fromkeys(run.told for run in runs if run.told):
        places = [run.place for run in runs if run.told == what]
        say(f"{what}: {plural(len(places), 'run')}, such as {places[0]}")
    if not runs:
        raise StudyFileError(Fault("", "expected runs, got none", source))
    return runs


def _only_runs(runs: Iterable[Run], left_out: dict[str, list[str]]) -> Iterator[Run]:
    """Those that are runs; places of the others by what they are."""
    for run in runs:
        if run.no_run:
            left_out.setdefault(run.no_run, []).append(run.place)
        else:
            yield run


def without(runs: Sequence[Run], mapped: Mapping[str, Meaning]) -> tuple[list[Run], dict[str, Meaning]]:
    """The runs whose places do not mean nothing, and what names mean."""
    places = {run.place for run in runs}
    left = {
        name: meaning for name, meaning in mapped.items() if not (meaning == "nothing" and name in places)
    }
    return [run for run in runs if run.place in left or mapped.get(run.place) != "nothing"], left


def runs_in(rows: Any) -> list[Run]:
    """Runs of a DataFrame with a run in each row, where NaN stands for no value, or of mappings of names to values."""
    frame = hasattr(rows, "to_dict")
    each = (dict(flat(row)) for row in (rows.to_dict("records") if frame else rows))
    # Only NaN differs from itself.
    known = ({name: value for name, value in row.items() if not frame or value == value} for row in each)
    return [with_devices_counted(Run(f"run {place}", values=row)) for place, row in enumerate(known)]


def is_source(text: str) -> bool:
    """Whether a text names a source of runs rather than a study."""
    prefix = text.partition(":")[0]
    path = Path(text)
    return prefix in _readers() or path.suffix.lower() in SUFFIXES or os.path.isdir(text)  # noqa: PTH112  # of any text


def _thinned(runs: Iterable[Run], say: Callable[[str], None]) -> list[Run]:
    """At most `MOST_RUNS` of them, evenly selected, so that memory does not grow with their number."""
    kept: list[Run] = []
    every, count = 1, 0
    for run in runs:
        if count % every == 0:
            kept.append(run)
            if len(kept) == MOST_RUNS:
                kept, every = kept[::2], every * 2
        count += 1
        if count % 100_000 == 0:
            say(f"{count:,} runs read")
    if every > 1:
        say(f"{count:,} runs: one in {every} is used, {len(kept):,}. Select runs beforehand to use others.")
    return kept


def _readers() -> tuple[str, ...]:
    return (*_READERS, *(point.name for point in entry_points(group=_GROUP)))


def _reader(source: str) -> tuple[Reader, str]:
    prefix, colon, rest = source.partition(":")
    if colon and re.fullmatch(r"[a-z][a-z0-9_-]+", prefix):
        if prefix in _READERS:
            return _built_in(prefix), rest
        if entry_points(group=_GROUP, name=prefix):
            return plug_in(_GROUP, prefix), rest
        if not os.path.lexists(source):
            known = _readers()
            message = (
                f"expected a table, a folder, or one of {', '.join(known)} before the colon; got {prefix!r}."
            )
            raise StudyFileError(Fault("", message + near_miss(prefix, known), source))
    path = Path(source)
    if path.is_dir():
        for name, pattern in _HOLDS:
            if next(path.rglob(pattern), None) is not None:
                return _built_in(name), source
        held = ", ".join(pattern for _, pattern in _HOLDS)
        raise StudyFileError(
            Fault("", f"expected a folder that holds runs ({held}), got none of these", source)
        )
    if not path.exists():
        raise StudyFileError(
            Fault("", "expected a table, a folder of runs, or reader:what; there is no such file", source)
        )
    return _built_in("tables"), source


def _built_in(name: str) -> Reader:
    reader: Reader = import_module(f"{__package__}.readers.{name}").read
    return reader
