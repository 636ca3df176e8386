"""Runs of TensorBoard: each folder with event files, in the folder that is named or below it."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from ....spaces.boundary.files import foreign, regular
from ....spaces.errors import StudyFileError, cut
from ..runs import Run, Scalar, Status, curve_results
from ..values import spent
from .folders import MOST_LOG_BYTES

# Not of success: torch writes that as soon as hyperparameters are added, be it before the first step.
_STATUS: dict[int, Status] = {2: "failed", 3: "running"}

# Lightning writes it at step 0 again when a run is resumed.
_LIGHTNINGS = "hp_metric"


class _Events:
    """What one event file holds, or all those of a run."""

    def __init__(self) -> None:
        self.settings: dict[str, Scalar] = {}
        self.curves = defaultdict[str, list[tuple[int, float]]](list)  # steps and values
        self.status: Status = ""
        self.clock: list[tuple[int, float]] = []  # steps, and seconds since 1970
        self._plugins: dict[str, str] = {}  # by tag: only its first value names one

    def add(self, event: Any, path: Path) -> None:
        self.clock.append((event.step, event.wall_time))
        for value in event.summary.value:
            content = value.metadata.plugin_data
            plugin = self._plugins.setdefault(value.tag, content.plugin_name)
            if value.HasField("simple_value"):
                self.curves[value.tag].append((event.step, value.simple_value))
            elif plugin == "scalars":  # TensorFlow's and Keras's
                # A few bytes may claim to be many.
                if any(size.size != 1 for size in value.tensor.tensor_shape.dim):
                    raise _fault(path, f"one number for each step of {cut(value.tag, 60)}, got a tensor.")
                make = import_module("tensorboard.util.tensor_util").make_ndarray
                self.curves[value.tag].append((event.step, float(make(value.tensor).item())))
            elif plugin == "hparams":
                session = import_module(
                    "tensorboard.plugins.hparams.plugin_data_pb2"
                ).HParamsPluginData.FromString(content.content)
                settings = {
                    name: _scalar(given) for name, given in session.session_start_info.hparams.items()
                }
                if settings and self.settings and settings != self.settings:
                    raise _fault(
                        path,
                        "the hyperparameters of one run in each file, got those of several. Write a file a run.",
                    )
                self.settings |= settings
                self.status = _STATUS.get(session.session_end_info.status, self.status)

    def continues(self, earlier: _Events) -> bool:
        """Whether it may be of the same run: no hyperparameter differs, and each curve that both have begins later here."""
        if self.settings and earlier.settings and self.settings != earlier.settings:
            return False
        shared = self.curves.keys() & earlier.curves.keys() - {_LIGHTNINGS}
        return all(self.curves[name][0][0] > earlier.curves[name][0][0] for name in shared)

    def then(self, later: _Events) -> _Events:
        """Both as one run; from where the later one begins, as after a resume, its values count."""
        both = _Events()
        both.settings, both.status = self.settings | later.settings, later.status or self.status
        begins = next((step for step, _ in later.clock if step), 0)
        both.clock = [(step, at) for step, at in self.clock if step < begins or not begins] + later.clock
        both.curves.update(self.curves)
        for name, values in later.curves.items():
            before = [(step, value) for step, value in self.curves.get(name, ()) if step < values[0][0]]
            both.curves[name] = before + values
        return both

    def take(self, other: _Events) -> None:
        """Add what a folder below says of the same run; this one's own curves stay."""
        self.settings, self.status = other.settings, other.status
        self.clock = sorted(self.clock + other.clock, key=lambda one: one[1])
        for name, values in other.curves.items():
            self.curves.setdefault(name, values)

    def run(self, folder: Path) -> Run:
        took, told = spent([at for _, at in self.clock])
        results: dict[str, Scalar] = {"duration_s": took} if took > 0 else {}
        for name, values in self.curves.items():
            results |= curve_results(name, (value for _, value in values))
        return Run(str(folder), self.settings, results, status=self.status, told=told)


def read(source: str) -> Iterator[Run]:
    """The runs of a folder; what `SummaryWriter.add_hparams` put into a folder below a run's belongs to that run.

    Raises:
        StudyFileError: there are no event files, they cannot be read, or are of several runs that nothing tells apart.
    """
    try:
        loader = import_module("tensorboard.backend.event_processing.event_file_loader")
    except ImportError:
        raise _fault(
            source, "the package tensorboard to read it, found none. Install it: pip install tensorboard"
        ) from None
    if not Path(source).expanduser().is_dir():
        raise _fault(source, "a folder, found none. Check the path.")
    folders = defaultdict[Path, dict[Path, _Events]](dict)
    for path in sorted(Path(source).expanduser().rglob("events.out.tfevents*")):
        with foreign(str(path), "an event file"):
            _check_lengths(regular(path, "an event file", MOST_LOG_BYTES))
            for event in loader.LegacyEventFileLoader(str(path)).Load():
                folders[path.parent].setdefault(path, _Events()).add(event, path)
    if not folders:
        raise _fault(
            source,
            "events.out.tfevents* files with events, found none in or below it. Name SummaryWriter's folder.",
        )
    runs = {
        place: run for folder, files in folders.items() for place, run in _told_apart(folder, files).items()
    }
    yield from (events.run(place) for place, events in _joined(runs).items())


def _check_lengths(path: Path) -> None:
    """Refuse a record that says it is longer than its file, which the loader would allocate."""
    size = path.stat().st_size
    with path.open("rb") as file:
        while len(head := file.read(12)) == 12:
            (length,) = struct.unpack("<Q", head[:8])
            if length > size:
                raise ValueError(f"a record of {length:,} bytes")
            file.seek(length + 4, 1)


def _told_apart(folder: Path, files: dict[Path, _Events]) -> dict[Path, _Events]:
    """The runs in a folder: one, whose files continue each other, or one for each file that has its own hyperparameters."""
    first, *later = sorted(files.values(), key=lambda events: events.clock[0][1])
    run = first
    for events in later:
        if not events.continues(run):
            break
        run = run.then(events)
    else:
        return {folder: run}
    if not all(events.settings for events in files.values()):
        raise _fault(
            folder,
            f"the event files of one run, got {len(files)} files whose curves begin at the same step or whose hyperparameters "
            "differ, and not each has its own. Move each run's files into a folder of its own.",
        )
    return files


def _joined(folders: dict[Path, _Events]) -> dict[Path, _Events]:
    """Runs by folder, each with its hyperparameters; folders that disagree on these are runs of their own."""
    below = defaultdict[Path, list[Path]](list)
    for folder, events in folders.items():
        if events.settings and folder.parent in folders and not folders[folder.parent].settings:
            below[folder.parent].append(folder)
    for parent, children in below.items():
        if all(folders[child].settings == folders[children[0]].settings for child in children):
            for child in children:
                folders[parent].take(folders.pop(child))
    return folders


def _fault(source: str | Path, expected: str) -> StudyFileError:
    return StudyFileError(f"tensorboard:{source}: expected {expected}")


def _scalar(given: Any) -> Scalar:
    """A protobuf Value, which has no integers: whole numbers are taken for some."""
    value: Scalar = getattr(given, given.WhichOneof("kind") or "string_value")
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value
