"""Trainings of Hugging Face's Trainer: a folder that holds `trainer_state.json` files, at any depth."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ....spaces.boundary.files import foreign, regular
from ....spaces.boundary.secrets import is_secret
from ..runs import Run, Scalar, curves_results, flat
from .folders import json_object, runs_below

_STATE = "trainer_state.json"
_LARGEST = 1 << 22  # bytes of pickled arguments, which are a few thousand
# The rate logged is its schedule's, not the setting.
_NO_CURVES = (
    "epoch",
    "step",
    "learning_rate",
    "grad_norm",
)


def read(source: str) -> Iterator[Run]:
    """One run for each `output_dir`: of its own state, otherwise of its last checkpoint's.

    Raises:
        StudyFileError: the folder holds no such file, or one cannot be read.
    """
    return runs_below(
        source, _of_folder, f"the output_dir of a Trainer, or a folder of them; got no {_STATE}"
    )


def _of_folder(folder: Path, folders: list[str], files: list[str]) -> Run | None:
    steps = {int(name[11:]): name for name in folders if re.fullmatch(r"checkpoint-\d+", name)}
    folders[:] = [name for name in folders if name not in steps.values()]
    states = (folder, *(folder / steps[step] for step in sorted(steps, reverse=True)))
    last = next((state for state in states if (state / _STATE).is_file()), None)
    if last is None:
        return None
    with foreign(f"{last}/{_STATE}", "a state as Trainer writes it"):
        return _run(folder, last, states)


def _run(folder: Path, last: Path, places: tuple[Path, ...]) -> Run:
    state = _document(last / _STATE)
    settings = {name: state.get(name) for name in ("train_batch_size", "num_train_epochs")}
    settings |= (
        _document(folder / "args.json")
        | _document(folder / "training_args.json")
        | _arguments((last, *places))
    )
    settings["num_train_epochs"] = state.get("num_train_epochs", settings.get("num_train_epochs"))
    if (
        settings.get("auto_find_batch_size")
        and settings.get("world_size", 1) == 1
        and state.get("train_batch_size")
    ):
        # What was trained, not what was asked for.
        settings["per_device_train_batch_size"] = state["train_batch_size"]
    # In the arguments -1 where epochs are given.
    settings["max_steps"] = state.get("max_steps", settings.get("max_steps", 0))
    results = dict(flat(_document(folder / "all_results.json") | _document(folder / "train_results.json")))
    results |= _curves(state) | dict(flat({name: state.get(name) for name in ("global_step", "epoch")}))
    over, told = "train_runtime" in results, ""
    if over and _written_over_s(places) > 1.05 * float(results["train_runtime"]) + 60:
        told = "resumed: train_runtime covers only the last part, so the seconds are unknown"
        results = {name: value for name, value in results.items() if name != "train_runtime"}
    over = over or 0 < int(settings["max_steps"] or 0) <= int(state.get("global_step") or 0)
    shown = {
        name: value for name, value in flat(settings) if not (is_secret(name) or name.endswith("_token"))
    }
    return Run(str(folder), shown, results, status="finished" if over else "", told=told)


def _written_over_s(places: tuple[Path, ...]) -> float:
    """Seconds between the first and the last of a training's states; a copy may have lost them."""
    written = [(place / _STATE).stat().st_mtime for place in places if (place / _STATE).is_file()]
    return max(written) - min(written) if written else 0.0


def _curves(state: dict[str, Any]) -> dict[str, Scalar]:
    """What was logged: training's totals, which are logged once, and the ends of curves."""
    curves, totals = defaultdict[str, list[float]](list), dict[str, Scalar]()
    for name, value in (pair for entry in state.get("log_history", ()) for pair in flat(entry)):
        if name.startswith("train_") or name == "total_flos":
            totals[name] = value
        elif name not in _NO_CURVES and isinstance(value, int | float):
            curves[name].append(value)
    return totals | curves_results(curves)


def _document(path: Path) -> dict[str, Any]:
    """A file's JSON object; empty where there is no such file."""
    return json_object(path) if path.is_file() else {}


class _Inert:
    """Stands in for every class and function that a pickle names: it keeps what it is given, and runs nothing."""

    state: Any = None

    def __new__(cls, *given: Any, **_: Any) -> _Inert:
        made = super().__new__(cls)
        made.given = given
        return made

    def __init__(self, *given: Any, **_: Any) -> None:
        self.given = given

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def _leave_out(self, *_: Any) -> None: ...

    append = extend = add = __setitem__ = _leave_out


class _Row(tuple[Any, ...]):
    """A tuple that hashes at once: nested in itself sixty times, as the key of a mapping, another takes years."""

    __hash__ = object.__hash__


_TUPLES = frozenset(code[0] for code in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3))


def _then_row(load: Callable[[Any], None]) -> Callable[[Any], None]:
    def loaded(unpickler: Any) -> None:
        load(unpickler)
        unpickler.stack[-1] = _Row(unpickler.stack[-1])

    return loaded


class _Unpickler(pickle._Unpickler):
    """Whoever sends a pickle chooses what it calls; here that is `_Inert` alone.

    The one that is written in C would allocate whatever memory a few bytes name.
    """

    dispatch = {
        code: _then_row(load) if code in _TUPLES else load
        for code, load in pickle._Unpickler.dispatch.items()
        if code != pickle.BYTEARRAY8[0]  # allocates what a few bytes name
    }

    def find_class(self, module: str, name: str, /) -> Any:
        return _Inert


def _arguments(places: tuple[Path, ...]) -> dict[str, Any]:
    """The attributes of pickled TrainingArguments; an enum's is its text."""
    path = next((path for place in places if (path := place / "training_args.bin").is_file()), None)
    if path is None:
        return {}
    with foreign(str(path), "TrainingArguments as torch.save writes them"):
        with zipfile.ZipFile(regular(path, "TrainingArguments", _LARGEST)) as archive:
            (entry,) = (entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl"))
            if entry.file_size > _LARGEST:
                raise ValueError(f"{entry.file_size} bytes of arguments")
            with archive.open(entry) as file:
                state: dict[str, Any] = _Unpickler(file).load().state
        ranks = state.get("distributed_state")
        processes = ranks.state.get("num_processes") if isinstance(ranks, _Inert) and ranks.state else None
        # DataParallel splits a process's batch over its GPUs; with one process each, and on a CPU, that is one.
        gpus, processes = state.get("_n_gpu"), processes if isinstance(processes, int) else 1
        own = {name: _plain(value) for name, value in state.items() if not name.startswith("_")}
        return own | {"world_size": processes * max(gpus if isinstance(gpus, int) else 1, 1)}


def _plain(value: Any) -> Any:
    """An enum's text, and of a mapping what is not nested: a pickle may nest without end."""
    if isinstance(value, _Inert):
        value = value.given[-1] if value.given else None
    if isinstance(value, dict):
        return {
            name: each
            for name, each in value.items()
            if isinstance(name, str) and isinstance(each, bool | int | float | str)
        }
    return value if isinstance(value, bool | int | float | str) else None
