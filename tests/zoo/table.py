"""What bsearch makes of every training of the zoo, in one table: `python tests/zoo/table.py [part of a name]`.

Another version's, from a folder that holds its checkout under the name bsearch:
`PYTHONPATH=/tmp/before_path:tests python tests/zoo/table.py`.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))

import torch
from bsearch.objectives.loading import load_task
from bsearch.objectives.profiling.task_profile import profile_task
from bsearch.objectives.task import Task
from bsearch.objectives.training import TrainingRun
from bsearch.spaces.errors import BsearchError
from bsearch.spaces.laws.device import DeviceProfile, ProfileRequest
from bsearch.spaces.study.devices import Memory
from bsearch.spaces.trial import TrialSetup
from helpers import setup
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from zoo.api import has
from zoo.entries import ENTRIES, Entry
from zoo.plain import RATE

BATCH, MICRO_BATCHES = 50, 4
# A relative difference in single precision up to which sums are the same in another order.
ROUNDING = 1e-6


def made(
    entry: Entry, batch: int = BATCH, accumulation: int = 1, budget: int = BATCH, **changes: Any
) -> TrialSetup:
    """A setup whose rate stays as it is, and which splits a remainder as well."""
    training = {"schedule": "constant", "warmup": 0.0, **changes.pop("training", {})}
    cap = -(-batch // accumulation)
    return setup(
        batch,
        accumulation,
        budget,
        RATE,
        metric=entry.metric,
        largest_micro_batch=cap,
        training=training,
        **changes,
    )


def profile(entry: Entry, **changes: Any) -> DeviceProfile:
    """What comes before the first trial."""
    return profile_task(entry.reference, ProfileRequest(made(entry, **changes), Memory(), highest=100))


# One step, whole and split


class SameNoise(TorchDispatchMode):
    """Gives every sample the random numbers that it got when the batch was whole: rows of what was drawn then."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []  # of the micro-batches to come
        self._drawn: dict[tuple[int, int], Tensor] = {}  # by step, and in the order of drawing
        self._records, self._step, self._start, self._size, self._next = True, 0, 0, 0, 0

    def around(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """A task's loss, in which samples get their noise."""

        def with_noise(model: Any, batch: Any, setup: TrialSetup) -> Any:
            self._size, self._next = self.sizes.pop(0), 0
            with self:
                result = loss(model, batch, setup)
            self._start += self._size
            if self._start == BATCH:
                self._step, self._start = self._step + 1, 0
            return result

        return with_noise

    def replay(self) -> None:
        self._records, self._step = False, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in function.tags or not isinstance(result, Tensor):
            return result
        if not result.dim() or len(result) != self._size:
            return result
        place = self._step, self._next
        self._next += 1
        if self._records:
            self._drawn[place] = result.clone()
        elif place in self._drawn:
            rows = self._drawn[place][self._start : self._start + self._size]
            if rows.shape == result.shape:
                result.copy_(rows)
        return result


def first_step(entry: Entry, accumulation: int, noise: SameNoise) -> tuple[Tensor, Tensor]:
    """The gradient of the first step, as the product's own code hands it to the optimizer; and what of the model's floating
    state no optimizer updates, after two.
    """
    kept: list[Tensor] = []
    state = torch.zeros(0)

    def keep(optimizer: Any, *_: Any) -> None:
        if not kept:
            gradients = [
                one.grad
                for group in optimizer.param_groups
                for one in group["params"]
                if one.grad is not None
            ]
            kept.append(torch.cat([one.to_dense().detach().flatten().double() for one in gradients]))

    setup = made(entry, accumulation=accumulation, budget=2 * BATCH, training={"evaluations": 1})
    task = load_task(entry.reference)
    handle = register_optimizer_step_pre_hook(keep)
    try:
        if isinstance(task, Task):
            task.loss = noise.around(task.loss)  # type: ignore[method-assign]
            noise.sizes = [*setup.plan.micro_batches(), *setup.plan.micro_batches()]
            run = TrainingRun(task, setup)
            measurements: Any = run.measurements()
        else:
            torch.manual_seed(setup.seed)
            measurements = task(setup)
        with closing(measurements):
            try:
                next(measurements)
            except Exception:
                if not kept:  # what comes after the step is not compared
                    raise
    finally:
        handle.remove()
    if isinstance(task, Task):
        learnt = {id(parameter) for parameter in run.parameters}
        others = [one for one in run.model.state_dict(keep_vars=True).values() if id(one) not in learnt]
        state = torch.cat([state, *(one.detach().flatten() for one in others if one.is_floating_point())])
    return kept[0], state


def differences(entry: Entry) -> list[str]:
    """Relative difference of the first step's gradient, of the split one from the whole one, and of the other state, if any."""
    noise = SameNoise()
    whole = first_step(entry, 1, noise)
    noise.replay()
    gradient, state = (
        float((ours - theirs).norm() / theirs.norm().clamp(min=1e-12))
        for ours, theirs in zip(first_step(entry, MICRO_BATCHES, noise), whole, strict=True)
    )
    return [f"{gradient:.0e}", *([f"state {state:.0e}"] if state > ROUNDING else [])]


def scores_apart(entry: Entry) -> list[str]:
    """The largest relative difference of the new model's metrics between evaluation batches of 16 and 512, and between two
    evaluations, where they are no rounding.
    """
    task = load_task(entry.reference)
    if not isinstance(task, Task):
        return []
    run = TrainingRun(task, made(entry, evaluation_batch=512))
    first, again = run.evaluate(), run.evaluate()
    small = TrainingRun(task, made(entry, evaluation_batch=16)).evaluate()

    def apart(other: Mapping[str, float]) -> float:
        return max(abs(other[name] - value) / max(abs(value), 1e-12) for name, value in first.items())

    return [
        f"{name} {off:.0e}"
        for name, off in (("score", apart(small)), ("again", apart(again)))
        if off > ROUNDING
    ]


# The table


def row(entry: Entry) -> tuple[str, str, str, str]:
    if entry.needs and not has(entry.needs):
        return entry.name, "-", "-", f"could not be written: needs {entry.needs}"
    difference = "; ".join([*told(differences, entry), *told(scores_apart, entry)])
    try:
        found = profile(entry)
    except BsearchError as error:
        return entry.name, "refused", difference, _short(str(error))
    except Exception as error:
        return entry.name, "crashed", difference, _short(f"{type(error).__name__}: {error}")
    examination = getattr(found, "examination", None)
    if examination is None:
        return entry.name, "-", difference, found.note or "valid"
    said = "; ".join(f"{one.where}: {one.message}" for one in examination.findings)
    return (
        entry.name,
        examination.verdict,
        difference,
        _short(said or getattr(examination, "note", "") or "valid"),
    )


def told(what: Callable[[Entry], list[str]], entry: Entry) -> list[str]:
    try:
        return what(entry)
    except Exception as error:
        return [type(error).__name__]


def _short(text: str, width: int = 110) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"


def main(part: str = "") -> None:
    warnings.simplefilter("ignore")
    titles = ("training", "examined as", "whole against split", "what bsearch says")
    rows = []
    for entry in ENTRIES:
        if part in entry.name:
            print(entry.name, file=sys.stderr)
            rows.append(row(entry))
    widths = [max(len(line[column]) for line in [titles, *rows]) for column in range(3)]
    for line in [titles, *rows]:
        print("  ".join([*(text.ljust(width) for text, width in zip(line, widths, strict=False)), line[3]]))


if __name__ == "__main__":
    main(*sys.argv[1:2])
