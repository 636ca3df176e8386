"""The Python API: run a study, open one, and get its results; the command line uses the same functions."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..objectives.task_code import task_code_hash
from ..search.analysis.choice import Choice, chosen_trial
from ..search.report.export import trial_document
from ..search.store.stored import StoredStudy
from ..search.store.url import shown_url
from ..spaces.boundary.files import file_name, write_file
from ..spaces.boundary.storage import is_url, sqlite_url, storage_of
from ..spaces.domain import share
from ..spaces.errors import BsearchError, Fault, StudyFileError, TaskError
from ..spaces.front import ParetoFront
from ..spaces.readable import from_here, number, out_of
from ..spaces.record import TrialRecord, counted
from ..spaces.study.file import changed_study, read_study, resolve_study, study_from_dict
from ..spaces.study.spec import Framework, StudySpec
from ..spaces.trial import Measurement

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

    from ..search.laws.verdicts import Verdict
    from ..search.run.driver import StudyResult
    from ..search.run.events import Event
    from ..search.run.runner import Runner
    from ..search.run.study_run import StudyRun
    from ..search.run.training import Training


class Trials(tuple[TrialRecord, ...]):
    """Trials in a fixed order, fastest first on a front and by number otherwise."""

    _front: ParetoFront

    def __new__(cls, records: Iterable[TrialRecord], front: ParetoFront) -> Trials:
        trials = super().__new__(cls, records)
        trials._front = front
        return trials

    def to_dicts(self) -> list[dict[str, Any]]:
        """A flat dict for each trial, with the columns of `bsearch export`."""
        return [trial_document(record, self._front) for record in self]

    def to_frame(self) -> pandas.DataFrame:
        """A pandas DataFrame, a row per trial, with the columns of `bsearch export`.

        Raises:
            StudyFileError: pandas is not installed.
        """
        try:
            import pandas
        except ModuleNotFoundError:
            raise StudyFileError(
                "to_frame: expected pandas, which is not installed. Install it, or use to_dicts()."
            ) from None
        return pandas.DataFrame(self.to_dicts())

    def _repr_html_(self) -> str:
        from ..search.report.columns import trial_columns
        from ..search.report.export import html_table

        return html_table(trial_columns(self, self._front))


class ExportedText(str):
    """One trial's settings as text for a framework.

    Attributes:
        trial: the trial's number.
        notes: what the framework cannot express exactly.
    """

    trial: int
    notes: tuple[str, ...]

    def __new__(cls, text: str, trial: int, notes: Iterable[str]) -> ExportedText:
        exported = super().__new__(cls, text)
        exported.trial, exported.notes = trial, tuple(notes)
        return exported


class Study:
    """A study in its storage, by its file or a database URL: its front, its trials, exports, plots and reports.

    It shows the study at one moment; `reload` reads it again.

    Args:
        name: which one, where the storage holds several.
        storage: database instead of the study file's own.

    Raises:
        StudyFileError: there is none, or several and no name says which.
        StorageError: the storage cannot be opened.
    """

    def __init__(self, path_or_url: str | Path, name: str | None = None, storage: str | None = None) -> None:
        text, storage = str(path_or_url), storage or storage_of(os.environ)
        self._stored = stored = StoredStudy.open(text, name, storage)
        if is_url(text):
            # A database does not hold the study file's folder; that of the task's file is nearly always the same.
            task = Path(stored.spec.task.rpartition(":")[0])
            folder = task.parent if task.suffix == ".py" else Path.cwd()
            self._spec, self._results = (
                resolve_study(stored.spec, folder, stored.url),
                Path("results").absolute(),
            )
        else:
            self._spec, self._results = (
                read_study(Path(text), storage=storage),
                Path(text).parent.absolute() / "results",
            )

    @classmethod
    def _made(cls, stored: StoredStudy, spec: StudySpec, results: Path) -> Study:
        made = cls.__new__(cls)
        made._stored, made._spec, made._results = stored, spec, results
        return made

    @classmethod
    def of(
        cls,
        runs: str | Path | pandas.DataFrame | Iterable[Mapping[str, Any]],
        to: str | Path,
        *,
        metric: str | None = None,
        direction: Literal["minimize", "maximize"] | None = None,
        meanings: Mapping[str, str] | None = None,
        same: bool = False,
    ) -> Study:
        """A study made of runs that were trained without bsearch, as `bsearch ask --save` makes one.

        Args:
            runs: a source as `bsearch ask` reads it, a DataFrame with a run in each row, or mappings of names to values.
            to: the SQLite file to write.
            metric: the name of the result by which runs are compared, where several could be meant.
            direction: of it, where its name does not tell.
            meanings: what names mean, such as `{"step size": "learning_rate"}`.
            same: runs of several tasks, data sets or models are one experiment.

        Raises:
            StudyFileError: they cannot be read, names are unclear, times are missing, or the file exists.
            StorageError: it cannot be written.
        """
        from ..search.sources.columns import columns_of
        from ..search.sources.imported import imported
        from ..search.sources.read import runs_in, runs_of, without
        from ..search.sources.store import written

        where = str(runs) if isinstance(runs, str | Path) else "runs"
        some = runs_of(where) if isinstance(runs, str | Path) else runs_in(runs)
        some, mapped = without(some, {**(meanings or {}), **({metric: "metric"} if metric else {})})
        groups = imported(where, some, columns_of(where, some, mapped=mapped, direction=direction, same=same))
        if len(groups) > 1:
            names = "; ".join(one.name for one in groups[:8])
            raise StudyFileError(
                f"{where}: expected one experiment, got {names}. Give the runs of one, or same=True."
            )
        (name,) = written(Path(to), where, groups)
        return cls(sqlite_url(Path(to).absolute()), name)

    def verdicts(self, batches: Iterable[int] = ()) -> list[Verdict]:
        """What the trials say, as `bsearch ask` prints it: the front, the best rate, the critical batch, and what is silent.

        Args:
            batches: at which the best rate is asked for, and nothing else.
        """
        from ..search.laws.verdicts import verdicts

        return verdicts(self._stored, batches=tuple(batches))

    @property
    def name(self) -> str:
        """Its full name in the storage."""
        return self._stored.name

    @property
    def url(self) -> str:
        """The storage, without passwords."""
        return shown_url(self._stored.url)

    @property
    def spec(self) -> StudySpec:
        """The study file as of the last run."""
        return self._stored.spec

    @property
    def model(self) -> Path | None:
        """The folder of the model that it has kept, if its budget asks for one."""
        from ..search.run.kept_model import model_folder
        from ..search.run.training import RESULT

        folder = model_folder(self._spec, self.name)
        return folder if folder is not None and (folder / RESULT).exists() else None

    @property
    def front(self) -> Trials:
        """The trials that no other beats in both seconds and metric, fastest first."""
        return Trials(self._stored.front.trials, self._stored.front)

    @property
    def trials(self) -> Trials:
        """Every trial, by number."""
        return Trials(self._stored.records, self._stored.front)

    @property
    def best(self) -> TrialRecord | None:
        """The front's most accurate trial; None while there is no front."""
        return next(iter(reversed(self._stored.front.trials)), None)

    def within(self, tolerance: str | float) -> TrialRecord:
        """The fastest trial of the front that is at most a share of the best's metric worse, such as `"1%"` or 0.01.

        Raises:
            StudyFileError: there is no front yet, or not a share.
        """
        return chosen_trial(self.name, self._stored.front, Choice(within=_share(tolerance)))

    def export(
        self,
        to: Framework = "hf",
        trial: int | Literal["best"] | None = None,
        within: str | float | None = None,
        *,
        target: float | None = None,
        cheapest_to: float | None = None,
    ) -> ExportedText:
        """The settings of one trial of the front, as code or configuration for a framework.

        Args:
            trial: its number; `"best"`: the one with the best metric.
            within: the fastest trial at most this share worse than the best; without any choice 1 %.
            target: the fastest trial whose metric is at least this good.
            cheapest_to: of all trials, the one of least cost whose metric is at least this good.

        Raises:
            StudyFileError: no such framework, no such trial on the front, or several choices.
        """
        from ..search.report.frameworks import FRAMEWORKS
        from ..search.report.frameworks.settings import settings_to_export

        if to not in FRAMEWORKS:
            raise StudyFileError(f"to: expected one of {', '.join(FRAMEWORKS)}; got {to!r}")
        choice = Choice(trial, None if within is None else _share(within), target, cheapest_to)
        chosen = settings_to_export(self._stored, choice)
        exported = FRAMEWORKS[to](chosen)
        return ExportedText(exported.text, chosen.trial, exported.notes)

    def train(
        self,
        *,
        trial: int | Literal["best"] | None = None,
        within: str | float | None = None,
        target: float | None = None,
        cheapest_to: float | None = None,
        epochs: float | None = None,
        seeds: int = 1,
        out: str | Path | None = None,
        serial: bool = False,
        say: Callable[[str], None] = print,
    ) -> tuple[Training, ...]:
        """Train a point of the front with the study's own task, and keep its model.

        Args:
            trial, within, target, cheapest_to: which point, as for `export`.
            epochs: instead of the trial's.
            seeds: how many to train with: 1 is the trial's own, more are new ones.
            out: folder for model, optimizer, log and settings; default: results/NAME/trial-N.
            serial: in this process, without Ray.
            say: is given lines of progress.

        Raises:
            StudyFileError: no such point, or a folder that holds a trained model.
            ClusterError, OutputError: Ray cannot be started, or the folder cannot be written.
            TaskError: a training did not complete; those that did are in their folders.
        """
        choice = Choice(trial, None if within is None else _share(within), target, cheapest_to)
        trainings = train_point(self, choice, epochs=epochs, seeds=seeds, out=out, serial=serial, say=say)[2]
        if failed := [training for training in trainings if not training.complete]:
            raise TaskError(
                f"{self.name}: {len(failed)} of {len(trainings)} trainings did not complete: {failed[0]!r}"
            )
        return trainings

    def plot(self) -> plotly.graph_objects.Figure:
        """The front as a Plotly figure, which a notebook shows.

        Raises:
            StudyFileError: no trial has finished yet.
        """
        from ..search.report.page.draw import plotly_figure
        from ..search.report.page.figures import front_figure
        from ..search.report.page.study_data import StudyData

        if not self._stored.front.trials:
            raise StudyFileError(f"study {self.name}: has no finished trial yet, so there is nothing to plot")
        return plotly_figure(front_figure(StudyData(self._stored)))

    def report(self, path: str | Path | None = None) -> Path:
        """Write the study as one HTML page that opens without a network; by default into results/NAME/report.html.

        Raises:
            OutputError: the file cannot be written.
        """
        from ..search.laws.best_rate import with_rates
        from ..search.report.page.page import report_page
        from ..search.report.page.study_data import StudyData

        target = self._results / file_name(self.name) / "report.html" if path is None else Path(path)
        stored = with_rates(self._stored)
        return write_file(target, report_page(StudyData.of(stored)))

    def resume(self, **overrides: Any) -> Study:
        """Resume the study until its budget is met, and return it as it is then; `overrides` as for `run`.

        Raises:
            StudyFileError: something changed that must not change, such as the task's code.
        """
        options, sections = _options(overrides)
        return _run(changed_study(self._spec, sections), self._results, **options)

    def reload(self) -> Study:
        """The study as its storage holds it now."""
        return Study._made(self._stored.reread(), self._spec, self._results)

    def __repr__(self) -> str:
        done = out_of(counted(self._stored.records), self.spec.budget.trials, " of ")
        metric = self._stored.front.metric
        best = "" if self.best is None else f", best {metric} {number(self.best.accuracy)}"
        return f"<Study {self.name}: {done} trials, {len(self.front)} on the front{best}>"

    def _repr_html_(self) -> str:
        from html import escape

        return f"<p>{escape(repr(self)[1:-1])}</p>{self.front._repr_html_()}"


def train_point(
    study: Study,
    choice: Choice,
    *,
    epochs: float | None,
    seeds: int,
    out: str | Path | None,
    serial: bool,
    say: Callable[[str], None],
) -> tuple[StoredStudy, TrialRecord, tuple[Training, ...]]:
    """Train a point of a study's front; what the command line and `Study.train` share.

    Returns:
        The study as it was, the chosen trial, and its trainings.

    Raises:
        StudyFileError, ClusterError, OutputError: see `Study.train`.
    """
    from ..search.report.terminal.train import opening_lines, progress_line
    from ..search.run.train import planned_trainings, train

    stored, spec, results = study._stored, study._spec, study._results / file_name(study.name)
    record = chosen_trial(stored.name, stored.front, choice, stored.records)
    folder = results / f"trial-{record.number}" if out is None else Path(out).expanduser().absolute()
    trainings = planned_trainings(stored, record, folder, epochs=epochs, seeds=seeds)
    code = task_code_hash(spec.task)
    for line in opening_lines(stored, record, choice.reason(stored.front), trainings, code):
        say(line)

    def report(training: Training, measurement: Measurement) -> None:
        say(progress_line(training, measurement))

    with _runner(spec, results, serial=serial, say=say) as runner:
        return stored, record, tuple(train(stored, spec.task, code, trainings, runner, report))


def run(study: str | Path | Mapping[str, Any], **overrides: Any) -> Study:
    """Run a study, or resume it, until its budget is met; show progress on the terminal or in the notebook.

    Args:
        study: a study file, or its content as a mapping; relative paths in a mapping start at the working directory, and its
            `task` may be the class or function itself, if workers can import it.
        overrides: keys of the study that replace the file's, such as `budget={"trials": 20}`; keys of a section that are
            not given stay. Besides: `serial=True` runs trials one after the other in this process, without Ray; `new=True`
            creates a new study beside an existing one; `same_experiment=True` resumes it although its code has changed;
            `storage` names another database; `progress=False` shows nothing.

    Raises:
        StudyFileError: lists every error in the study.
        TaskError: the training code does not work.
        StorageError, ClusterError: the database or the cluster cannot be used.
        BsearchError: the study stopped because it cannot continue; the message says why. Finished trials are in the storage.
    """
    options, sections = _options(overrides)
    storage = sections.pop("storage", None) or storage_of(os.environ)
    if isinstance(study, Mapping):
        named = (
            study
            if isinstance(study.get("task", ""), str)
            else {**study, "task": reference_of(study["task"])}
        )
        spec = resolve_study(changed_study(study_from_dict(named), sections), Path.cwd(), storage)
        results = Path("results").absolute()
    else:
        spec = changed_study(read_study(Path(study), storage=storage), sections)
        results = Path(study).parent.absolute() / "results"
    return _run(spec, results, **options)


def reference_of(task: Any) -> str:
    """The name by which workers load a task's class or function: `module:name`, or `path/file.py:name` outside packages.

    Raises:
        StudyFileError: workers cannot import it, such as one defined in a notebook or inside a function.

    >>> from bsearch.objectives.digits import Digits
    >>> reference_of(Digits)
    'bsearch.objectives.digits:Digits'
    """
    name, module = getattr(task, "__qualname__", ""), sys.modules.get(getattr(task, "__module__", ""))
    file = getattr(module, "__file__", None)
    if (
        name.isidentifier()
        and module is not None
        and file is not None
        and getattr(module, name, None) is task
    ):
        by_file = module.__name__ == "__main__" or (not module.__package__ and "site-packages" not in file)
        return f"{Path(file).resolve()}:{name}" if by_file else f"{module.__name__}:{name}"
    shown = name or f"a {type(task).__name__}"
    raise StudyFileError(
        Fault(
            "task",
            f"expected a class or function that workers can import, or its name, such as tasks.py:Cifar; got {shown}. "
            "Define it at the top level of a file.",
        )
    )


def _options(overrides: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of a run, and keys of the study."""
    names = ("serial", "new", "same_experiment", "progress")
    options = {name: overrides[name] for name in names if name in overrides}
    return options, {name: value for name, value in overrides.items() if name not in names}


def _run(
    spec: StudySpec,
    results: Path,
    *,
    serial: bool = False,
    new: bool = False,
    same_experiment: bool = False,
    progress: bool = True,
) -> Study:
    from ..search.report.terminal.live import open_progress

    out = results / spec.study
    with open_progress(progress) as shown:
        result = run_study_here(
            spec,
            out,
            serial=serial,
            new=new,
            same_experiment=same_experiment,
            notify=shown.notify,
            watch=shown.watch,
        )
    if result.failure:
        raise BsearchError(f"study {result.study.name} stopped: {result.failure}")
    if result.interrupted:
        raise KeyboardInterrupt
    return Study._made(result.study, spec, results)


def run_study_here(
    spec: StudySpec,
    out: Path,
    *,
    serial: bool,
    new: bool,
    same_experiment: bool,
    notify: Callable[[Event], None],
    watch: Callable[[StudyRun], None],
) -> StudyResult:
    """Run a study over Ray, or in this process; what the command line and `run` share.

    Args:
        out: folder of its results, for Ray's log.

    Raises:
        StudyFileError, TaskError, StorageError, ClusterError: see `search.run.driver.run_study`.
    """
    from ..search.report.optuna_view import kept_copy
    from ..search.run.driver import run_study
    from ..search.run.events import Event
    from ..spaces.boundary.plug_ins import plug_in

    def say(text: str) -> None:
        notify(Event("message", text=text))

    runner = _runner(spec, out, serial=serial, say=say)
    code = task_code_hash(spec.task)
    with ExitStack() as beside:
        begun = [beside.enter_context(kept_copy(say)), watch]
        if spec.tracking:
            tracking = plug_in("bsearch.beside", "tracking")
            begun.insert(0, beside.enter_context(tracking(spec.tracking, spec.storage or "", out, say)))

        def begin(run: StudyRun) -> None:
            for watcher in begun:
                watcher(run)

        return run_study(
            spec, runner, code, new=new, same_experiment=same_experiment, notify=notify, watch=begin
        )


def has_changed(spec: StudySpec) -> bool:
    """Whether all stored studies of this name have other settings or code, so that another begins beside them."""
    from ..search.store.stored import has_grown, is_same_experiment, study_identity
    from ..search.store.tables import Tables

    identity = study_identity(spec, task_code_hash(spec.task))
    with closing(Tables(spec.storage or "")) as tables:
        rows = tables.studies(spec.study)
    return bool(rows) and not any(
        is_same_experiment(row.identity, identity) or has_grown(row.identity, identity) for row in rows
    )


@contextmanager
def _runner(spec: StudySpec, out: Path, *, serial: bool, say: Callable[[str], None]) -> Iterator[Runner]:
    """What runs attempts: this process, or Ray, which starts here."""
    if serial:
        from ..objectives.parallel.meeting import warm
        from ..search.run.serial import SerialRunner

        runner = SerialRunner(spec.devices)
        warm(spec.task, runner.cores)
        if runner.notice:
            say(runner.notice)
        yield runner
        return
    say(f"study {spec.study}: starting Ray (its messages: {from_here(out / 'ray.log')})")
    from .tune import TuneRunner

    with TuneRunner(spec.cluster, spec.devices, out / "ray.log", say) as opened:
        yield opened


def _share(value: str | float) -> float:
    try:
        return share(value)
    except ValueError:
        raise StudyFileError(
            f"within: expected a share >= 0 and < 1, such as '1%' or 0.01; got {value!r}"
        ) from None
