"""Versions that Lightning's CSVLogger wrote: folders with `hparams.yaml` and `metrics.csv`, at any depth."""

from __future__ import annotations

import csv
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ....spaces.boundary.files import foreign, regular, text_of
from ....spaces.errors import Fault, StudyFileError, cut
from ....spaces.names import words_of
from ..runs import Run, Scalar, curves_results, flat
from ..values import number
from .folders import MOST_LOG_BYTES, runs_below

_NUMBERS = {"f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i"}  # NumPy's names, and those of `struct`
_MOST_BYTES = 1 << 20
_COUNTERS = ("epoch", "step")


def read(source: str) -> Iterator[Run]:
    """One run for each folder that holds one of the two files.

    Raises:
        StudyFileError: there is no such folder, or a file cannot be read.
    """
    return runs_below(
        source,
        _run,
        "a folder of Lightning's, such as lightning_logs; got no metrics.csv and no hparams.yaml",
    )


def _run(folder: Path, folders: list[str], files: list[str]) -> Run | None:
    if not {"metrics.csv", "hparams.yaml"} & set(files):
        return None
    return Run(str(folder), _settings(folder / "hparams.yaml"), _results(folder / "metrics.csv"))


class _Plain(yaml.SafeLoader):
    """Builds nothing that a tag names: what is tagged is read as the mapping, list or text that it is written as."""


def _tagged(loader: _Plain, tag: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    if not isinstance(node, yaml.SequenceNode):
        return tag.partition("python/name:")[2] or str(node.value)
    values = loader.construct_sequence(node, deep=True)
    if tag.endswith("multiarray.scalar"):
        return _unpacked(*values) if len(values) == 2 else None
    return values[0] if len(values) == 1 and "python/object" in tag else values  # such as an enum's value


_Plain.add_multi_constructor("", _tagged)


def _unpacked(kind: Any, raw: Any) -> float | None:
    """A number of NumPy's, which is pickled into YAML."""
    try:
        return float(struct.unpack(kind["state"][1] + _NUMBERS[kind["args"][0]], raw)[0])
    except (LookupError, TypeError, struct.error):
        return None


def _settings(path: Path) -> dict[str, Scalar]:
    if not path.exists():
        return {}
    text = text_of(path, "settings", _MOST_BYTES)
    with foreign(str(path), "settings in YAML"):
        try:
            found = _Plain(text).get_single_data() or {}
        except yaml.MarkedYAMLError as error:
            at = None if error.problem_mark is None else error.problem_mark.line + 1
            message = f"expected settings in YAML: {cut(str(error.problem), 200)}. Mend it, or move it away."
            raise StudyFileError(Fault("", message, str(path), at)) from None
        if not isinstance(found, dict):
            message = (
                f"expected settings in YAML: got {type(found).__name__} instead of names with values. Mend "
                "it, or move it away."
            )
            raise StudyFileError(Fault("", message, str(path)))
        return dict(flat(found))


def _results(path: Path) -> dict[str, float]:
    """The ends of the columns' curves; a row fills only some of its cells."""
    curves = defaultdict[str, list[float]](list)
    if not path.exists():
        return {}
    table = regular(path, "a CSV table", MOST_LOG_BYTES)
    with (
        foreign(str(path), "a CSV table"),
        table.open(newline="", encoding="utf-8", errors="replace") as file,
    ):
        for row in csv.DictReader(line for line in file if line.endswith("\n")):  # the last may be cut off
            texts = {
                name: text for name, text in row.items() if isinstance(name, str) and isinstance(text, str)
            }
            filled = {name: value for name, text in texts.items() if (value := number(text)) is not None}
            tested = filled.keys() > {*_COUNTERS} and all(
                name in _COUNTERS or "test" in words_of(name) for name in filled
            )
            for name, value in filled.items():
                if not (tested and name in _COUNTERS):  # after a training, at an epoch of its own
                    curves[name].append(value)
    counters = {name: curves.pop(name)[-1] for name in _COUNTERS if name in curves}
    if "epoch" in counters:
        counters["epoch"] += 1  # the first is number 0
    return counters | curves_results(curves)
