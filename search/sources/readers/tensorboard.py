"""Runs of TensorBoard: each folder with event files, in the folder that is named or below it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from ....spaces.errors import StudyFileError
from ..runs import Run, Scalar, Status, curve_results

# Not of success: torch writes that as soon as hyperparameters are added, be it before the first step.
_STATUS: dict[int, Status] = {2: "failed", 3: "running"}


class _Events:
    """What the event files of a folder hold."""

    def __init__(self) -> None:
        self.settings: dict[str, Scalar] = {}
        self.curves = defaultdict[str, list[float]](list)
        self.status: Status = ""
        self.first_s, self.last_s = math.inf, -math.inf  # since 1970
        self._plugins: dict[str, str] = {}  # by tag: only its first value names one

    def add(self, event: Any) -> None:
        self.first_s, self.last_s = min(self.first_s, event.wall_time), max(self.last_s, event.wall_time)
        for value in event.summary.value:
            content = value.metadata.plugin_data
            plugin = self._plugins.setdefault(value.tag, content.plugin_name)
            if value.HasField("simple_value"):
                self.curves[value.tag].append(value.simple_value)
            elif plugin == "scalars":  # TensorFlow's and Keras's
                make = import_module("tensorboard.util.tensor_util").make_ndarray
                self.curves[value.tag].append(float(make(value.tensor)))
            elif plugin == "hparams":
                session = import_module("tensorboard.plugins.hparams.plugin_data_pb2").HParamsPluginData.FromString(
                    content.content
                )
                self.settings |= {name: _scalar(given) for name, given in session.session_start_info.hparams.items()}
                self.status = _STATUS.get(session.session_end_info.status, self.status)

    def take(self, other: _Events) -> None:
        """Add what a folder below says of the same run; this one's own curves stay."""
        self.settings, self.status = other.settings, other.status
        self.first_s, self.last_s = min(self.first_s, other.first_s), max(self.last_s, other.last_s)
        for name, values in other.curves.items():
            self.curves.setdefault(name, values)

    def run(self, folder: Path) -> Run:
        results: dict[str, Scalar] = {"duration_s": self.last_s - self.first_s} if self.first_s < self.last_s else {}
        for name, values in self.curves.items():
            results |= curve_results(name, values)
        return Run(str(folder), self.settings, results, status=self.status)


def read(source: str) -> Iterator[Run]:
    """The runs of a folder; what `SummaryWriter.add_hparams` put into a folder below a run's belongs to that run."""
    try:
        loader = import_module("tensorboard.backend.event_processing.event_file_loader")
    except ImportError:
        raise _fault(source, "the package tensorboard to read it, found none. Install bsearch[tracking].") from None
    if not Path(source).expanduser().is_dir():
        raise _fault(source, "a folder, found none. Check the path.")
    folders = defaultdict[Path, _Events](_Events)
    try:
        for path in sorted(Path(source).expanduser().rglob("events.out.tfevents*")):
            for event in loader.LegacyEventFileLoader(str(path)).Load():
                folders[path.parent].add(event)
    except OSError as error:
        raise _fault(source, f"event files that can be read, got {error}") from None
    if not folders:
        raise _fault(source, "events.out.tfevents* files with events, found none in or below it. Name SummaryWriter's folder.")
    yield from (events.run(folder) for folder, events in _joined(folders).items())


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


def _fault(source: str, expected: str) -> StudyFileError:
    return StudyFileError(f"tensorboard:{source}: expected {expected}")


def _scalar(given: Any) -> Scalar:
    """A protobuf Value, which has no integers: whole numbers are taken for some."""
    value: Scalar = getattr(given, given.WhichOneof("kind") or "string_value")
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value
