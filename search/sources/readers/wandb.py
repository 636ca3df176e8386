"""Runs of Weights & Biases: from the logs in a `wandb/` folder, or of a project `ENTITY/PROJECT` through its API."""

from __future__ import annotations

import json
import math
import re
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ....spaces.boundary.files import foreign, regular
from ....spaces.errors import StudyFileError, cut
from ..runs import Run, Scalar, Status, curve_results, flat
from .folders import MOST_LOG_BYTES

# The API's states that are an end.
_ENDS: dict[str, Status] = {"finished": "finished"}
_ENDS |= dict.fromkeys(("failed", "crashed", "killed", "preempted"), "failed")
# As JSON has no such numbers.
_NOT_FINITE = {
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
}
_TIME = re.compile(r"run-(\d{8}_\d{6})-")
# Logs are LevelDB's: a part's checksum, length, and kind (1 is a whole record, 2 its first part, 3 a middle one, 4 the last).
_BLOCK_BYTES, _PART = 32768, struct.Struct("<IHB")


def read(source: str) -> Iterator[Run]:
    """The runs of a `wandb/` folder, of the folder around it, or of one run's folder; or of `ENTITY/PROJECT`."""
    try:
        wandb = import_module("wandb")
    except ImportError:
        raise _fault(
            source, "the package wandb to read it, found none. Install it: pip install wandb"
        ) from None
    folder = Path(source).expanduser()
    if folder.is_dir():
        logs = [
            log
            for depth in ("", "*run-*/", "wandb/*run-*/")
            for log in sorted(folder.glob(f"{depth}*.wandb"))
        ]
        if not logs:
            raise _fault(
                source, "folders named run-* or offline-run-* with a .wandb file in each, found none."
            )
        try:
            yield from _joined(map(_logged, logs))
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
            Run(
                "/".join(run.path),
                _scalars(run.config),
                _scalars(run.summary_metrics),
                status=_ENDS.get(run.state, "running"),
            )
            for run in found or ()
        ]
    except Exception as error:  # W&B raises its own errors, its transport's, and ValueError for a project that does not exist
        raise _fault(
            project, f"{expected} got: {cut(str(error), 300).rstrip('.')}. Check the name, key and network."
        ) from None
    if found is None:
        raise _fault(
            project, f"{expected} no API key. Run `wandb login` or set WANDB_API_KEY, and unset WANDB_MODE."
        )
    if not runs:
        raise _fault(project, "a project with runs, found none in it. Check the name.")
    return runs


@dataclass(frozen=True, slots=True)
class _Log:
    """What a log holds: a run, or the part of it before or after it was resumed.

    Args:
        identity: of the run; the same where it was resumed.
        history: what was logged by step, with the run's seconds among it.
    """

    folder: str
    identity: tuple[str, ...]
    config: dict[str, Any]
    summary: dict[str, Any]
    history: list[dict[str, float]]
    status: Status

    def after(self, earlier: _Log) -> _Log:
        """Both as one run: from where this one begins, its history replaces that of the earlier one.

        Offline a resumed run cannot know how far it came, so W&B counts its steps and seconds from 0 again: then they come
        after the earlier ones.
        """
        history, steps = earlier.history, [row["_step"] for row in earlier.history if "_step" in row]
        first = next((row["_step"] for row in self.history if "_step" in row), math.inf)
        again = bool(steps) and first <= steps[0]
        last = {"_step": steps[-1] + 1 if again else 0.0, "_runtime": 0.0}
        if not again:
            history = [row for row in history if row.get("_step", -math.inf) < first]
        ran = [row["_runtime"] for row in earlier.history if "_runtime" in row]
        if ran and next((row["_runtime"] for row in self.history if "_runtime" in row), math.inf) < max(ran):
            last["_runtime"] = max(ran)
        own = [{name: value + last.get(name, 0.0) for name, value in row.items()} for row in self.history]
        place = f"{earlier.folder} and {Path(self.folder).name}"
        both = {**earlier.config, **self.config}, {**earlier.summary, **self.summary}
        return _Log(place, self.identity, *both, [*history, *own], self.status)

    def run(self) -> Run:
        curves, results = defaultdict[str, list[float]](list), dict[str, Scalar]()
        for name, value in (pair for row in self.history for pair in row.items()):
            curves[name].append(value)
        for name, values in curves.items():
            results |= {name: max(values)} if name.startswith("_") else curve_results(name, values)
        counted: dict[str, Scalar] = {
            name: value for name, value in results.items() if name in ("_runtime", "_step")
        }
        return Run(
            self.folder,
            _scalars(self.config),
            _scalars({**results, **self.summary, **counted}),
            status=self.status,
        )


def _joined(logs: Iterable[_Log]) -> Iterator[Run]:
    """Runs, a resumed one as one: the folders of its logs are named by their time."""
    runs = dict[tuple[str, ...], _Log]()
    for log in sorted(logs, key=lambda log: _TIME.findall(log.folder)):
        runs[log.identity] = log.after(runs[log.identity]) if log.identity in runs else log
    return (log.run() for log in runs.values())


def _logged(log: Path) -> _Log:
    with foreign(str(log), "a log of W&B"):
        return _read_log(log)


def _read_log(log: Path) -> _Log:
    """What is in a log. One without its end, as a killed run leaves it, counts as running: nobody can tell them apart."""
    config, summary, history = dict[str, Any](), dict[str, Any](), list[dict[str, float]]()
    status: Status = "running"
    identity: tuple[str, ...] = (str(log),)  # of a log that is cut before the run's name
    for record in _records(log):
        if record.run.run_id:
            identity = record.run.entity, record.run.project, record.run.run_id
        for known, change in (
            (config, record.run.config),
            (config, record.config),
            (summary, record.summary),
        ):
            known.update(_items(change.update))
            for item in change.remove:
                known.pop(".".join(item.nested_key) or item.key, None)
        # At its end a run's summary has whole seconds only, so that its last measurement may be later.
        row = {
            name: value
            for name, value in _items([*record.history.item, *record.summary.update])
            if isinstance(value, int | float) and (record.HasField("history") or name == "_runtime")
        }
        if row:
            history.append(row)
        if record.HasField("exit"):
            status = "failed" if record.exit.exit_code else "finished"
    return _Log(str(log.parent), identity, config, summary, history, status)


def _items(items: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for item in items:
        yield ".".join(item.nested_key) or item.key, json.loads(item.value_json)


def _scalars(values: Mapping[str, Any]) -> dict[str, Scalar]:
    """What the user logged, by dotted names: without W&B's own notes, and without images, histograms and other media."""
    named = dict(flat(values))
    left_out = (
        "_wandb",
        "_timestamp",
        *(name.removesuffix("_type") for name in named if name.endswith("._type")),
    )
    return {
        name: _NOT_FINITE.get(str(value), value)
        for name, value in named.items()
        if not name.startswith(left_out)
    }


def _records(log: Path) -> Iterator[Any]:
    """Records of a log, as far as it is whole. The package had a reader, `DataStore`, that releases such as 0.31 lack."""
    record_type = import_module("wandb.proto.wandb_internal_pb2").Record
    with regular(log, "a log of W&B", MOST_LOG_BYTES).open("rb") as file:
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
