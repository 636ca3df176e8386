"""LCBench: neural networks on tabular data, eight parameters, by a surrogate.

Sources: Zimmer et al. 2021, arXiv 2006.13799; the surrogate is YAHPO's, Pfisterer et al. 2022, arXiv 2109.03670.

The folder `lcbench` of $BSEARCH_DATA holds the surrogate, `model.onnx`. Seconds are a function of what costs time: epochs,
batch, layers and units. The surrogate's depend on rate, momentum, weight decay and dropout as well, by 20 % in the median: an
artefact, so log seconds are averaged over those four. A curve is the accuracy at each tenth of the epochs, but not before the
first epoch, where the surrogate extrapolates to nonsense.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from onnxruntime import InferenceSession, SessionOptions
from optuna.distributions import FloatDistribution, IntDistribution
from problems import FRACTIONS, Problem, random_value
from scipy.interpolate import RegularGridInterpolator
from scipy.stats.qmc import Sobol

TASKS = (
    "167083",
    "167104",
    "167149",
    "167152",
    "167161",
    "167168",
    "167181",
    "167184",
    "167185",
    "167190",
    "167200",
    "168331",
)
LEAST_S = 0.1  # at corners of the space the surrogate's seconds fall below zero

# As the surrogate's `config_space.json` has them, in the order of its input.
SPACE: dict[str, Any] = {
    "epochs": IntDistribution(1, 52),
    "effective_batch": IntDistribution(16, 512, log=True),
    "learning_rate": FloatDistribution(1e-4, 0.1, log=True),
    "momentum": FloatDistribution(0.1, 0.99),
    "weight_decay": FloatDistribution(1e-5, 0.1),
    "layers": IntDistribution(1, 5),
    "units": IntDistribution(64, 1024, log=True),
    "dropout": FloatDistribution(0.0, 1.0),
}
# Where seconds are computed; log seconds are interpolated in between: 2 % off in the median, 8 % at most.
GRID: dict[str, Sequence[float]] = {
    "epochs": (1, 2, 3, 5, 8, 12, 18, 26, 38, 52),
    "effective_batch": (16, 25, 40, 64, 101, 161, 256, 362, 512),
    "layers": (1, 2, 3, 4, 5),
    "units": (64, 102, 161, 256, 406, 645, 1024),
}
LOG_UNITS = np.log(GRID["units"])
# What is fixed beside the epochs where those are: typical values.
RECIPE: dict[str, float] = {"momentum": 0.9, "weight_decay": 0.01, "dropout": 0.2}
SIZE: dict[str, float] = {"momentum": 0.9, "layers": 3, "units": 256}
AVERAGED = tuple(name for name in SPACE if name not in GRID)
ROUNDS = 15  # of neighbours; 35 more add .4 % to the hypervolume at most, on three tasks


class LCBench(Problem):
    """One task: a network's accuracy on its validation set, as a share.

    Args:
        code: of the task, for the surrogate.
        fixed: parameters that are not searched. The reference point is then the median of random settings: without epochs
            to search, most settings are far above 0.
    """

    lowest = 0.0

    def __init__(self, session: InferenceSession, code: int, fixed: Mapping[str, float]) -> None:
        self._session, self._code, self._fixed = session, code, fixed
        self.space = {name: domain for name, domain in SPACE.items() if name not in fixed}
        if fixed:
            self.lowest = (
                float(np.median(self._surrogate(self._random(2000, np.random.default_rng(3)))[:, 1])) / 100
            )

    def seconds(self, parameters: Mapping[str, Any]) -> float:
        parameters = {**self._fixed, **parameters}
        epochs, batch, layers = (parameters[name] - SPACE[name].low for name in list(GRID)[:3])
        logs = self._log_seconds_by_units[epochs, batch, layers]
        return math.exp(np.interp(math.log(parameters["units"]), LOG_UNITS, logs))

    def accuracy(self, parameters: Mapping[str, Any]) -> float:
        return float(self._surrogate(self._rows([parameters]))[0, 1]) / 100

    def curve(self, parameters: Mapping[str, Any], rng: np.random.Generator) -> list[float]:
        parameters = {**self._fixed, **parameters}
        epochs = [max(1.0, parameters["epochs"] * tenth / FRACTIONS) for tenth in range(1, FRACTIONS + 1)]
        predicted = self._surrogate(self._rows([{**parameters, "epochs": each} for each in epochs]))
        return [float(percent) / 100 for percent in predicted[:, 1]]

    def everything(self) -> list[tuple[float, float]]:
        """Random settings, and neighbours of the best: 40,000 random ones alone miss 7 to 20 % of the hypervolume."""
        rng = np.random.default_rng(1)
        rows = self._random(40_000, rng)
        found = self._points(rows)
        for _ in range(ROUNDS):
            best = rows[_front(found)]
            near = self._moved(best[rng.integers(len(best), size=8000)], rng)
            rows, found = np.concatenate([rows, near]), np.concatenate([found, self._points(near)])
        return [(float(seconds), float(accuracy)) for seconds, accuracy in found]

    def _random(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Random settings (count, 8)."""
        return self._rows(
            [{name: random_value(one, rng) for name, one in self.space.items()} for _ in range(count)]
        )

    def _points(self, rows: np.ndarray) -> np.ndarray:
        """Seconds and accuracy of settings (n, 8), (n, 2)."""
        return np.stack([self._seconds_of(rows), self._surrogate(rows)[:, 1] / 100], axis=1)

    def _moved(self, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Settings (n, 8), each with about three parameters moved by a twentieth of their range."""
        moved = rows.copy()
        for name in self.space:
            place, domain = list(SPACE).index(name), SPACE[name]
            step = 0.05 * rng.standard_normal(len(rows)) * (rng.random(len(rows)) < 3 / len(self.space))
            column = rows[:, place]
            near = (
                column * (domain.high / domain.low) ** step
                if domain.log
                else column + step * (domain.high - domain.low)
            )
            near = np.round(near) if isinstance(domain, IntDistribution) else near
            moved[:, place] = np.clip(near, domain.low, domain.high)
        return moved

    @cached_property
    def _log_seconds_by_units(self) -> np.ndarray:
        """At every value of the other three and the grid's units: searches ask for thousands of settings, one by one."""
        values = [np.arange(SPACE[name].low, SPACE[name].high + 1) for name in list(GRID)[:3]]
        axes = [*map(np.log, values), LOG_UNITS]
        return self._log_seconds(np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1))

    @cached_property
    def _log_seconds(self) -> RegularGridInterpolator:
        drawn = Sobol(len(AVERAGED), rng=0).random(32)
        others = []
        for row in drawn:
            ends = [(SPACE[name].low, SPACE[name].high, SPACE[name].log) for name in AVERAGED]
            values = [
                low * (high / low) ** share if log else low + share * (high - low)
                for share, (low, high, log) in zip(row, ends, strict=True)
            ]
            others.append(dict(zip(AVERAGED, values, strict=True)))
        corners = np.stack(np.meshgrid(*GRID.values(), indexing="ij"), axis=-1).reshape(-1, len(GRID))
        logs = np.zeros(len(corners))
        for values in others:
            columns = {**dict(zip(GRID, corners.T, strict=True)), **values}
            rows = np.stack([np.broadcast_to(columns[name], len(corners)) for name in SPACE], axis=1)
            logs += np.log(np.maximum(self._surrogate(rows)[:, 0], LEAST_S)) / len(others)
        shape = [len(axis) for axis in GRID.values()]
        return RegularGridInterpolator([np.log(axis) for axis in GRID.values()], logs.reshape(shape))

    def _seconds_of(self, rows: np.ndarray) -> np.ndarray:
        """Seconds of settings (n, 8), (n,)."""
        places = [list(SPACE).index(name) for name in GRID]
        return np.asarray(np.exp(self._log_seconds(np.log(rows[:, places]))))

    def _rows(self, settings: Sequence[Mapping[str, Any]]) -> np.ndarray:
        whole = ({**self._fixed, **one} for one in settings)
        return np.array([[one[name] for name in SPACE] for one in whole], dtype=float)

    def _surrogate(self, rows: np.ndarray) -> np.ndarray:
        """What the surrogate predicts for settings (n, 8), (n, 6): seconds, accuracy in percent, and four more."""
        codes = np.full((len(rows), 1), self._code, dtype=np.int32)
        return np.asarray(self._session.run(None, {"x_cat": codes, "x_cont": rows.astype(np.float32)})[0])


def lcbench_problems(
    folder: Path, tasks: Sequence[str] = TASKS, fixed: Mapping[str, float] = {}
) -> list[Problem]:
    """The tasks' problems, from the folder of the surrogate."""
    options = SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1  # the fastest, for single settings
    session = InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    codes = json.loads((folder / "encoding.json").read_text())["OpenML_task_id"]
    return [LCBench(session, codes[task], fixed) for task in tasks]


def _front(points: np.ndarray) -> np.ndarray:
    """Places of the points (n, 2), seconds and accuracy, that no other beats."""
    order = np.lexsort((-points[:, 1], points[:, 0]))
    best = np.maximum.accumulate(points[order, 1])
    return order[np.concatenate([[True], best[1:] > best[:-1]])]
