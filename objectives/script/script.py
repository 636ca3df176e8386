"""A training script that nobody has edited, as the loop of a trial: `run_script`."""

from __future__ import annotations

import math
import os
import shlex
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import length_hint
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ...spaces.errors import TaskError
from ...spaces.trial import Measurement, TrialSetup
from ..adapters.as_generator import Report, as_generator
from ..data.sample_weights import loader_order
from ..engine import is_served
from ..loop import Loop, Part, Step
from ..state.checkpoint import Checkpoint
from ..steps.rates import Stepped
from ..task import Data
from .files import FilesApart
from .metric import Output, metric_pattern, value_of
from .takeover import Made, aside, taken_over
from .told import Told, as_main, flags_of, kind_of, script_file

# Numbers of parts and of epochs that are not reached where a script is asked for single steps, all of one pass.
_ENDLESS, _ENDLESS_EPOCHS = 1_000_000, 1000
# What is kept of a script's output for messages, and how many lines of it they have.
_LAST_CHARACTERS, _LAST_LINES = 2000, 5
# What torch's schedulers call the number of their steps.
_LENGTHS = ("total_steps", "T_max", "total_iters")
# What is seen of a loader, see `seen_of`.
Seen = tuple[str, int, int]


def run_script(
    setup: TrialSetup,
    script: str,
    arguments: str = "",
    *,
    batch: str,
    rate: str,
    metric: str,
    epochs: str = "",
    steps: str = "",
    seed: str = "",
    loss: Literal["mean", "sum"] = "mean",
    splits: bool = True,
    resumes: bool = True,
    evaluates: bool = False,
    evaluation: Sequence[Seen] = (),
) -> Iterator[Measurement]:
    """Train by a script, with the trial's batch, rate, length and seed in the place of its own.

    What the script does with each batch stays as it is. A batch that does not fit comes in parts, of which the optimizer, its
    schedule and clipping see the sum. After each pass over the training data, the number that it prints is the measurement.

    Args:
        script: its path, relative to the study file's folder; `-m package.train` for one that is run as a module.
        arguments: as on a command line.
        batch, rate, epochs, steps, seed: how it is told these, see `Told`; `steps` is a number of batches, instead of epochs.
        metric: the text before the metric, in what it prints, logs and writes to CSV and JSON files, such as `Accuracy:`; a
            regular expression.
        loss: whether what it back-propagates is a mean over the batch's samples, or their sum.
        splits: whether a batch may come in parts; otherwise it has to fit, and the script does just what it does by itself.
        evaluates: whether its metric comes after it has iterated a loader without training: then what it writes after a pass
            before that is of its training data.
        evaluation: its loaders as it makes them by itself, see `seen_of`, and the one that it trains on once more with zeros.
            The others keep their batch in every trial, so that all are scored alike.
        resumes: whether a trial that was interrupted goes on from its checkpoint; otherwise it begins anew.

    Raises:
        TaskError: the script fails, or does something that a trial cannot carry.
    """
    path, _ = script_file(script, folder := Path(setup.folder or "."))
    if not path.is_file():
        raise TaskError(f"{script}: no such script in {folder.resolve()}")
    told = Told(batch, rate, epochs, steps, seed)
    if setup.training.schedule != "constant" or setup.training.warmup:
        raise TaskError(
            f"{script}: expected training: {{schedule: constant, warmup: 0}}, since a script has its own schedule"
        )
    setup = setup if resumes else replace(setup, checkpoint=None)
    run = partial(
        _Run,
        script=script,
        arguments=shlex.split(arguments),
        told=told,
        metric=metric,
        loss=loss,
        splits=splits,
        needs=evaluates,
        evaluation=evaluation,
    )

    def train(report: Report[Measurement]) -> None:
        try:
            run(setup, report=report).run()
        except _CannotPassOver:
            run(replace(setup, checkpoint=None), report=report).run()

    yield from as_generator(train)


def _in_whole_steps(setup: TrialSetup) -> TrialSetup:
    """The setup of a training that ends with a whole batch."""
    size = setup.effective_batch
    return replace(setup, samples_budget=max(setup.samples_budget // size, 1) * size)


def values_of(told: Told, setup: TrialSetup, *, endless: bool) -> dict[str, int | float]:
    """What a script is told in a trial, by name."""
    parts = _ENDLESS  # of single steps, such as of one sample, there is no plan of a budget
    if told.steps and not endless:
        parts = sum(run.count * len(run.plan.micro_batches()) for run in setup.steps())
    values: dict[str, int | float] = {
        told.batch: setup.effective_batch,
        told.rate: setup.learning_rate,
        told.epochs: max(math.ceil(setup.epochs), _ENDLESS_EPOCHS * endless),
        told.steps: parts,
        told.seed: setup.seed % 2**32,
    }
    return {name: value for name, value in values.items() if name}


class ScriptLoop(Loop):
    """A loop whose rates are the script's, and that is measured after every pass over the data."""

    schedules = False
    name = "a script"
    options = "training.clip_norm", "training.ema"

    def __init__(self, setup: TrialSetup, data: Data, made: Made) -> None:
        models = {f"model{number or ''}": model for number, model in enumerate(made.models())}
        optimizers = {f"optimizer{number or ''}": one for number, one in enumerate(made.of(Optimizer))}
        others = {
            f"other{number or ''}": one
            for number, one in enumerate([*made.of(LRScheduler), *made.of(GradScaler)])
        }
        super().__init__(setup, data, models, optimizers, others)

    def _make_rates(self, where: str) -> Stepped:
        return _ScriptRates(list(self.optimizers.values()))

    def _check_settings(self, where: str, optimizer: Optimizer) -> None:
        rates = list(map(rate_of, optimizer.param_groups))
        if not any(math.isclose(rate, self.setup.learning_rate, rel_tol=1e-6) for rate in rates):
            got = ", ".join(f"{rate:.4g}" for rate in rates)
            raise TaskError(
                f"expected a script that gives its optimizer the rate it is told, {self.setup.learning_rate:.4g}; got {got}. "
                "Say by rate= how it is told."
            )

    def _is_due(self, size: int) -> bool:
        seen = self.course.seen
        return self.passes(seen) > self.passes(seen - size) or self.course.is_over

    def evaluated_at(self, samples: int) -> list[int]:
        """After each pass, and at the end."""
        one = self.setup.samples_budget / self.setup.epochs
        return [*(round(one * number) for number in range(1, math.ceil(samples / one))), samples]

    def passes(self, samples: int) -> int:
        """Whole passes over the training data that so many samples are; the budget's last may be a part of one."""
        return int(samples * self.setup.epochs / self.setup.samples_budget + 1e-9)

    _unmeasured = False  # after the last pass


class _ScriptRates(Stepped):
    """Rates that the script sets."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        super().__init__(optimizers, [list(map(rate_of, optimizer.param_groups)) for optimizer in optimizers])
        self.frozen = False

    def set(self, fraction: float) -> None:
        for group in (group for one in self._optimizers if self.frozen for group in one.param_groups):
            group["lr"] = 0.0

    def forget(self) -> None:
        """Nothing is known of them."""

    def freeze(self) -> None:
        self.frozen = True


class _CannotPassOver(Exception):
    """The script does not work with passes of no batches, as those are that an earlier attempt has trained."""


class _Over(BaseException):
    """The trial's budget is trained, and the script would go on; no `Exception`, so that it does not catch it."""


class _Run:
    """One run of a script: the `Driver` of what it calls."""

    def __init__(
        self,
        setup: TrialSetup,
        script: str,
        arguments: Sequence[str],
        told: Told,
        metric: str,
        loss: Literal["mean", "sum"],
        splits: bool,
        needs: bool,
        evaluation: Sequence[Seen],
        report: Report[Measurement],
    ) -> None:
        self._where, self._arguments, self._told, self._report = script, arguments, told, report
        self.setup, self._planned = _in_whole_steps(setup) if told.steps else setup, setup.samples_budget
        self._metric_text, self._metric = metric, metric_pattern(metric)
        self._weighs, self._splits, self._needs_evaluation = loss == "mean", splits, needs
        self._made, self._loop = Made(), None
        self._output, self._written, self._scores, self._earlier = (
            Output(),
            "",
            dict[float, str](),
            dict[float, str](),
        )
        self._evaluation, self._unlike = evaluation, weakref.WeakSet[Any]()
        self._calls = Counter[int]()  # of schedulers, within passes
        self._step: Step | None = None
        self.share, self.is_last, self.has_gradients, self.skips = 1.0, True, False, False
        self._passes, self._resumes_at, self._place = 0, 0, -1
        self._came_from = Path.cwd()

    _loop: ScriptLoop | None

    def run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="bsearch-") as apart:
            self.files = FilesApart(Path(self.setup.folder or "."), Path(apart))
            self._run_script()
            try:
                self._leave_pass()
                self._measure()
            except TaskError:
                self._stop()
                raise
        loop = self._loop
        if loop is None:
            raise TaskError(
                f"{self._where}: expected a training loop over a torch DataLoader, with a model in training mode and an "
                f"optimizer; got none{self._said()}"
            )
        if loop._unmeasured and loop.course.is_over:
            raise TaskError(
                f"{self._where}: expected a number after {self._metric_text!r} once its training has ended (within a pass, it "
                f"describes training data); got none{self._said()}"
            )
        if next(self._steps, None) is not None:
            if self._resumes_at and not self._reported:
                raise _CannotPassOver
            told = "Say how it is told its length: epochs=, or steps=."
            if self._told.epochs or self._told.steps:
                told = "It stops by itself, such as early: leave that to the study (`stopping:`)."
            samples = self.setup.samples_budget
            raise TaskError(
                f"{self._where}: expected to train on {samples} samples, but it ended after {loop.course.seen}. {told}"
            )

    def _run_script(self) -> None:
        values = values_of(self._told, self.setup, endless=is_served())
        folder = Path(self.setup.folder or ".")
        try:
            with (
                taken_over(self, self._made),
                as_main(self._where, self._arguments, values, folder, self.files),
            ):
                pass
        except _Over:
            pass
        except Exception as error:
            self._stop()
            if self.skips:
                raise _CannotPassOver from error
            if isinstance(error, TaskError) and (words := self._in_its_words(str(error))):
                raise TaskError(f"{self._where}: {words}") from error
            raise
        except SystemExit as end:
            if end.code not in (None, 0):
                raise TaskError(f"{self._where}: it ended with exit code {end.code}{self._said()}") from end

    def _command(self) -> str:
        """What trains so without bsearch."""
        values = values_of(self._told, self.setup, endless=False)
        written = [
            f"{name} set to {value!r}"
            for name, value in values.items()
            if kind_of(name) in ("name", "text", "file")
        ]
        name = self._where.removeprefix("-m ")
        script = [name] if name == self._where else ["-m", name]
        command = shlex.join(["python", *script, *self._arguments, *flags_of(values)])
        return f"{command}  # with {', '.join(written)}" if written else command

    def _stop(self) -> None:
        """End the loop here, in the script's thread."""
        if self._loop is not None:
            self._steps.close()  # type: ignore[attr-defined]  # a generator

    @staticmethod
    def _in_its_words(error: str) -> str:
        """What an error of a `Loop` means for a script."""
        if "expected weights that stay as they are" in error:
            changed = error.partition("got ")[2].partition(" changed")[0]
            return (
                f"it moves {changed} after each part of a batch, as an average of weights that is updated once a step would. "
                "Write splits=False, and batches come whole."
            )
        if "an optimizer step in every step" in error:
            return (
                "expected an optimizer step after each batch of its loader, got none after the first. If it accumulates "
                "gradients itself, let it do so over one batch: its batch then is the step's."
            )
        return ""

    def _said(self) -> str:
        last = [line for line in self._written.splitlines() if line.strip()][-_LAST_LINES:]
        return f". It last wrote: {' / '.join(last)}" if last else ""

    # What the script calls

    def loader_made(self, loader: DataLoader[Any]) -> None:
        """Give a loader that evaluates the batch that it has where the script runs by itself."""
        kind, size, _ = seen_of(loader)
        alike = [one for one in self._evaluation if one[0] == kind]
        if len(alike) == 1 and 0 < alike[0][1] != size:
            # At once, since scripts divide by `len(loader)`; its own attribute is read-only.
            loader.batch_sampler.batch_size = vars(loader)["batch_size"] = alike[0][1]  # type: ignore[union-attr]
        if seen_of(loader) not in alike:
            self._unlike.add(loader)

    def trains(self, loader: DataLoader[Any]) -> bool:
        if training := trains(self._made):
            return training
        if loader in self._unlike and (self._loop or (seen_of(loader)[0], 0, 0) not in self._evaluation):
            raise TaskError(
                f"{self._where}: expected its loaders that evaluate among those of evaluation=, got {seen_of(loader)}, so its "
                "scores may depend on the trial's batch. Add its samples, batch and number of batches as they are where the "
                "script runs by itself, or let `bsearch init` look at it again."
            )
        with aside():
            self._leave_pass()
            if self._step is None and not self._evaluates:
                self._evaluates = True
                self.wrote("".join(["\n", *self.files.new_rows()]))
                self._earlier, self._scores = self._scores, {}
        return training

    def _leave_pass(self) -> None:
        """End a pass that the script has left, such as by `break`, after its last step."""
        if self._step is not None and self._has_stepped and self._step.evaluates:
            self._has_left = self._ends_pass()
            self._passes += 1

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        with aside():
            self._begin_pass(loader)
        return _Pass(self)

    def _begin_pass(self, loader: DataLoader[Any]) -> None:
        if self._loop is None:
            self.files.new_rows()  # of before the training
            if (size := batch_of(loader)) != self.setup.effective_batch:
                raise TaskError(
                    f"{self._where}: expected a training loader with the batch it is told, {self.setup.effective_batch}; got "
                    f"{size}. Say by batch= how it is told."
                )
            weights, shuffle = loader_order(self._where, loader)
            samples = len(loader.dataset)  # type: ignore[arg-type]
            if size > samples:
                raise TaskError(
                    f"{self._where}: expected a batch of at most the {samples} samples of its training data, got "
                    f"{self.setup.effective_batch}"
                )
            # In proportion to the budget, which is a few steps where it is examined.
            self._had_length, told = self._knows_length, math.ceil(self.setup.epochs) / self.setup.epochs
            self._batches = len(loader) * self.setup.samples_budget * told / samples
            if loader.drop_last:
                self.setup = _in_whole_steps(self.setup)
            data = Data(
                loader.dataset, loader.dataset, collate=loader.collate_fn, weights=weights, shuffle=shuffle
            )
            self._loop = loop = ScriptLoop(self.setup, data, self._made)
            loop.splits = self._splits
            self._steps, self._parts = iter(loop), iter(())
            if (state := Checkpoint.of(self.setup).load()) is not None:
                self._resumes_at = loop.passes(state["samples_seen"])
        elif loader.dataset is not self._loop.data.train:
            raise TaskError(
                f"{self._where}: expected one loader that it trains on, got another over other data while gradients are on and "
                "its models are training. Evaluate in model.eval() and torch.no_grad()."
            )
        else:
            self._leave_pass()
            self._measure()
        self._unlike.discard(loader)
        self._has_left = False
        self.skips, self._scores, self._earlier = self._passes < self._resumes_at, {}, {}
        self._evaluates = False
        self._begins_pass = True

    _begun = 0  # steps of this attempt
    _knows_length = _had_length = False
    _batches = 0.0  # that the script expects of its training
    _reported = _own_rates = _begins_pass = _has_stepped = _has_left = _waits = _evaluates = False
    _rates: Sequence[float] = ()
    _versions: Sequence[int] = ()
    _steps: Iterator[Step]
    _parts: Iterator[Part]

    def next_part(self) -> Any:
        """The next part of the pass.

        Raises:
            StopIteration: the pass is over.
        """
        if self.skips:
            self._passes += 1
            raise StopIteration
        if self._has_left:
            raise StopIteration
        if self._waits and not self.setup.training.accept_inexact:
            raise TaskError(
                f"{self._where}: expected a backward pass over each batch before it takes the next, got none. Let it take one "
                "batch at a time, without a prefetcher, and leave out none."
            )
        if (part := next(self._parts, None)) is None:
            if self._ends_pass():
                self._passes += 1
                raise StopIteration
            self._step, self._begun = next(self._steps, None), self._begun + 1
            if self._step is None:
                if self._begins_pass and self._told.epochs and not is_served():
                    raise TaskError(
                        f"{self._where}: expected {self._told.epochs} to set the number of epochs; it was set to "
                        f"{math.ceil(self.setup.epochs)}, but the script started another epoch. Set epochs= to what does."
                    )
                raise _Over
            if self._begins_pass:
                self._rates = self._rates_now()  # between passes a script may set them itself
                self._begins_pass = False
            self._parts, self._place = iter(self._step), -1
            part = next(self._parts)
        assert self._step is not None
        self._place, self._has_stepped, self._waits = self._place + 1, False, True
        self.share, self.is_last = (
            part.weight if self._weighs else 1.0,
            self._place == len(self._step.sizes) - 1,
        )
        if self.is_last:
            next(self._parts, None)  # no more: with this one the script steps
        return part.batch

    def _ends_pass(self) -> bool:
        """Whether the step that is over was its pass's last; then its time has ended."""
        step, self._step = self._step, None
        if step is not None and step.evaluates:
            self.files.new_rows()  # of within the pass
        self.share, self.is_last, self.has_gradients = 1.0, True, False
        return step is not None and step.evaluates

    def schedules(self, scheduler: Any, step: Any) -> None:
        """Let a scheduler that counts batches come to its end with the training: steps go over the ends of epochs, so there are
        fewer than epochs * len(loader). One that was stepped after every batch so far takes its share of those, unless the
        script has made it without len(loader), or of as many steps as there are.
        """
        times = 1
        if scheduler is not None and self._step is not None and not is_served():
            self._calls[id(scheduler)] += 1
            if 2 * self._calls[id(scheduler)] > self._begun and self._counts_batches(scheduler):
                seen = self._loop.course.seen  # type: ignore[union-attr]  # it is within a step
                each = self._batches / self.setup.samples_budget
                times = int(seen * each + 1e-6) - int((seen - self._step.samples) * each + 1e-6)
                if self._told.steps:  # it is told a number of parts
                    times = len(self._step.sizes)
        for _ in range(times):
            try:
                step()
            except ValueError as error:
                if "Tried to step" not in str(error):
                    raise  # else it holds its last rate: the script has rounded down what it is made of
        self._rates = self._rates_now()

    def told_length(self) -> None:
        self._knows_length = True

    def _counts_batches(self, scheduler: Any) -> bool:
        """Whether a scheduler's length is of len(loader), which the script had asked for before its first step."""
        length = next((length for name in _LENGTHS if (length := getattr(scheduler, name, None))), None)
        return self._had_length and length != sum(steps.count for steps in self.setup.steps())

    def _rates_now(self) -> list[float]:
        return [float(group["lr"]) for one in self._made.of(Optimizer) for group in one.param_groups]

    def back_propagates(self, loss: Tensor) -> None:
        """Check that what the script does after each part leaves the gradients of the parts before alone.

        Raises:
            TaskError: it does not.
        """
        if (
            self.has_gradients
            and not self.setup.training.accept_inexact
            and self._gradients() != self._versions
        ):
            raise TaskError(
                f"{self._where}: it changes gradients after each part of a batch, such as by clamping them itself. Write "
                "splits=False, and batches come whole; or clip by torch's clip_grad_norm_ or clip_grad_value_."
            )

    def _gradients(self) -> list[int]:
        groups = (group for one in self._made.of(Optimizer) for group in one.param_groups)
        return [one.grad._version for group in groups for one in group["params"] if one.grad is not None]

    def back_propagated(self) -> None:
        self._waits = False
        self.has_gradients = not self.is_last
        self._versions = self._gradients() if self.has_gradients else []

    def stepped(self) -> None:
        self.has_gradients, self._has_stepped, self._waits = False, True, False
        if self._step is None or is_served() or self._rates_now() == self._rates:
            return
        self._own_rates = True
        if len(self._step.sizes) > 1 and not self.setup.training.accept_inexact:
            raise TaskError(
                f"{self._where}: it sets its rates itself within a pass, by counting batches, of which some come in parts. Use "
                "a scheduler of torch's, or write splits=False, and batches come whole."
            )

    def wrote(self, text: str) -> None:
        self._written = (self._written + text)[-_LAST_CHARACTERS:]
        for line in self._output.ended(text, in_pass=self._step is not None):
            self._scores |= dict.fromkeys(map(value_of, self._metric.finditer(line)), line.strip())

    def _measure(self) -> None:
        """Report what the script has measured after the pass that is over.

        Raises:
            TaskError: it has written several numbers after the metric's text.
        """
        with aside():
            self.wrote("".join(["\n", *self.files.new_rows()]))  # after a line that is not ended yet
        # What it wrote before it evaluated is of its training data, unless it wrote nothing else.
        earlier = {} if self._needs_evaluation else self._earlier
        scores = {} if self._needs_evaluation and not self._evaluates else self._scores or earlier
        loop, self._scores, self._earlier = self._loop, {}, {}
        if loop is None or loop.current is None or not loop.current.paused or loop.measured:
            return
        if not scores:
            loop.measured = loop._unmeasured = True
            return
        if len(scores) > 1:
            got = ", ".join(f"{value:.6g} in {line[:80]!r}" for value, line in scores.items())
            raise TaskError(
                f"{self._where}: metric: expected one number after {self._metric_text!r} once a pass, got {got}. Write more of "
                "the text before the one that is meant."
            )
        here = Path.cwd()
        os.chdir(self._came_from)  # whoever gets the measurement is there
        loop._unmeasured = False
        measured = loop.measure(**{self.setup.metric: next(iter(scores))})
        facts = {**measured.facts, "command": self._command()}
        if self._own_rates and self._told.epochs and facts["steps"] != self._batches:
            facts["own_schedule"] = f"of {self._batches:.6g} batches, where its training has {facts['steps']}"
        if loop.course.seen == self.setup.samples_budget < self._planned:
            facts["shortened_to"] = loop.course.seen / self._planned
        self._report(replace(measured, facts=facts))
        self._reported = True
        os.chdir(here)


def rate_of(group: Mapping[str, Any]) -> float:
    """A group's peak rate, from which a scheduler of torch's has perhaps gone down already."""
    return float(group.get("max_lr", group.get("initial_lr", group["lr"])))


def trains(made: Made) -> bool:
    """Whether a loader that is iterated now is trained on: gradients are on, and all models with an optimizer are training."""
    stepped = {
        id(one)
        for optimizer in made.of(Optimizer)
        for group in optimizer.param_groups
        for one in group["params"]
    }
    models = [model for model in made.models() if stepped & set(map(id, model.parameters()))]
    return torch.is_grad_enabled() and bool(models) and all(model.training for model in models)


def batch_of(loader: DataLoader[Any]) -> Any:
    """The size of a loader's batches; where a sampler of batches makes them, its."""
    return loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)


def seen_of(loader: DataLoader[Any]) -> Seen:
    """The sampler of a loader and what it draws in a pass; its batch, and how many of them: -1 where nobody knows."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    with aside():
        batches = length_hint(loader, -1)
    return f"{type(sampler).__name__} of {length_hint(sampler, -1)}", batch_of(loader) or -1, batches


class _Pass(Iterator[Any]):
    """The iterator that a script gets of its loader; it may drop it at any time, and ask for another."""

    def __init__(self, run: _Run) -> None:
        self._run = run

    def __next__(self) -> Any:
        with aside():
            return self._run.next_part()
