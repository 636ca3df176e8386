"""Runs of Weights & Biases: from the logs in a `wandb/` folder, or of a project `ENTITY/PROJECT` through its API."""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ....spaces.errors import StudyFileError, cut
from ..runs import Run, Scalar, Status, curve_results, flat

# The API's states that are an end.
_ENDS: dict[str, Status] = {
    "finished": "finished",
    "failed": "failed",
    "crashed": "failed",
    "killed": "failed",
    "preempted": "failed",
}
_NOT_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}  # as JSON has no such numbers
# Logs are LevelDB's: a part's checksum, length, and kind (1 is a whole record, 2 its first part, 3 a middle one, 4 the last).
_BLOCK_BYTES, _PART = 32768, struct.Struct("<IHB")


def read(source: str) -> Iterator[Run]:
    """The runs of a `wandb/` folder, of the folder around it, or of one run's folder; or of `ENTITY/PROJECT`."""
    try:
        wandb = import_module("wandb")
    except ImportError:
        raise _fault(source, "the package wandb to read it, found none. Install bsearch[tracking].") from None
    folder = Path(source).expanduser()
    if folder.is_dir():
        logs = [log for depth in ("", "*run-*/", "wandb/*run-*/") for log in sorted(folder.glob(f"{depth}*.wandb"))]
        if not logs:
            raise _fault(source, "folders named run-* or offline-run-* with a .wandb file in each, found none.")
        try:
            yield from map(_logged, logs)
        except OSError as error:
            raise _fault(source, f"logs that can be read, got {error}") from None
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        yield from _of_project(wandb, source)
    else:
        raise _fault(source, "a folder, or ENTITY/PROJECT; found no such folder. Check the path.")


def _fault(source: str | Path, expected: str) -> StudyFileError:
    return StudyFileError(f"wandb:{source}: expected {expected}")


def _of_project(wandb: Any, project: str) -> list[Run]:
    expected = "a folder, or a project that the W&B API shows; found no such folder, and"
    try:
        # `Api` alone would wait at a terminal until a key is typed.
        found = wandb.Api(timeout=30).runs(project, lazy=False) if wandb.login(prompt=False) else None
        runs = [
            Run("/".join(run.path), _scalars(run.config), _scalars(run.summary_metrics), status=_ENDS.get(run.state, "running"))
            for run in found or ()
        ]
    except Exception as error:  # W&B raises its own errors, its transport's, and ValueError for a project that does not exist
        raise _fault(project, f"{expected} got: {cut(str(error), 300).rstrip('.')}. Check the name, key and network.") from None
    if found is None:
        raise _fault(project, f"{expected} no API key. Run `wandb login` or set WANDB_API_KEY, and unset WANDB_MODE.")
    if not runs:
        raise _fault(project, "a project with runs, found none in it. Check the name.")
    return runs


def _logged(log: Path) -> Run:
    """The run in a log. One without its end, as a killed run leaves it, counts as running: nobody can tell them apart."""
    config, summary, curves = dict[str, Any](), dict[str, Any](), defaultdict[str, list[float]](list)
    status: Status = "running"
    for record in _records(log):
        for known, change in ((config, record.run.config), (config, record.config), (summary, record.summary)):
            known.update(_items(change.update))
            for item in change.remove:
                known.pop(".".join(item.nested_key) or item.key, None)
        # At its end a run's summary has whole seconds only, so that its last measurement may be later.
        for name, value in _items([*record.history.item, *record.summary.update]):
            if isinstance(value, int | float) and (record.HasField("history") or name == "_runtime"):
                curves[name].append(value)
        if record.HasField("exit"):
            status = "failed" if record.exit.exit_code else "finished"
    results = dict[str, Scalar]()
    for name, values in curves.items():
        results |= {name: max(values)} if name.startswith("_") else curve_results(name, values)
    runtime = {"_runtime": results["_runtime"]} if "_runtime" in results else {}
    return Run(str(log.parent), _scalars(config), _scalars({**results, **summary, **runtime}), status=status)


def _items(items: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for item in items:
        yield ".".join(item.nested_key) or item.key, json.loads(item.value_json)


def _scalars(values: Mapping[str, Any]) -> dict[str, Scalar]:
    """What the user logged, by dotted names: without W&B's own notes, and without images, histograms and other media."""
    named = dict(flat(values))
    left_out = ("_wandb", "_timestamp", *(name.removesuffix("_type") for name in named if name.endswith("._type")))
    return {name: _NOT_FINITE.get(str(value), value) for name, value in named.items() if not name.startswith(left_out)}


def _records(log: Path) -> Iterator[Any]:
    """Records of a log, as far as it is whole. The package had a reader, `DataStore`, that releases such as 0.31 lack."""
    record_type = import_module("wandb.proto.wandb_internal_pb2").Record
    with log.open("rb") as file:
        if not b":W&B".startswith(file.read(_PART.size)[:4]):
            raise _fault(log, "a log of W&B, found another file. Remove it.")
        record = b""
        while True:
            rest = _BLOCK_BYTES - file.tell() % _BLOCK_BYTES
            file.seek(rest if rest < _PART.size else 0, 1)  # no part begins so near a block's end
            header = file.read(_PART.size)
            if len(header) < _PART.size:
                return
            checksum, length, kind = _PART.unpack(header)
            part = file.read(length)
            if zlib.crc32(bytes((kind,)) + part) != checksum:
                return
            record = record + part if kind in (3, 4) else part
            if kind in (1, 4):
                yield record_type.FromString(record)
