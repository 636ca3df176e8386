"""Progress of a running study: a live picture on a terminal, a display in a notebook, a line per trial elsewhere."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, ConsoleRenderable, Group, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ....spaces.errors import plain
from ....spaces.front import ParetoFront
from ....spaces.readable import number, out_of, seconds
from ....spaces.record import TrialRecord
from ...run.events import Event
from ...run.view import RunningTrial, StudyView
from ..columns import Column, front_columns, some_members
from ..sentences import outcome_words, setting_words
from ..stdio.console import terminal
from .deadline import deadline_line
from .fitted import Fitted
from .tables import front_plot

if TYPE_CHECKING:
    from ...run.study_run import StudyRun

# A plot of fewer rows or columns shows nothing; beside the table it needs the table's columns as well.
_PLOT_ROWS, _PLOT_COLUMNS, _MOST_PLOT_ROWS = 9, 40, 18
# From this width on a running trial's machine, rate and remaining time are shown too.
_WIDE, _BAR = 76, 12

# Of the picture in a notebook.
_NOTEBOOK_COLUMNS, _NOTEBOOK_ROWS, _NOTEBOOK_REFRESH_S = 110, 30, 0.5


class Picture:
    """A study's view, laid out for the terminal at every refresh: what does not fit is left out, least important first.

    Args:
        view: returns the study's current view; None before there is one.
    """

    def __init__(self, view: Callable[[], StudyView | None]) -> None:
        self._view = view
        self._plot: tuple[object, str] = (None, "")  # drawing it costs more than all the rest
        self.widths: list[int] = []  # of the rows on the terminal now

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        view = self._view()
        if view is None:
            return
        # The cursor has a row of its own below the picture.
        height = max((options.height or console.height) - 1, 1)
        parts = Group(*self._parts(view, options.max_width, height, plots=not options.ascii_only))
        # Cut here: a terminal would wrap longer lines, and rows that were not counted are not erased.
        lines = console.render_lines(parts, options.update(height=None), pad=False)[:height]
        self.widths = [sum(segment.cell_length for segment in line) for line in lines]
        for index, line in enumerate(lines):
            yield from line
            if index < len(lines) - 1:
                yield Text("\n", end="")

    def _parts(self, view: StudyView, width: int, height: int, *, plots: bool) -> Iterable[ConsoleRenderable]:
        head = list(_head(view, width))[:height]
        yield from head
        left = height - len(head)
        # A third of the rows left is for running trials, the rest for the front.
        rows = min(len(view.running), max(left // 3, 1), left)
        if rows:
            more = len(view.running) - rows
            yield _running_table(view.running[:rows], view.front.metric, width)
            left -= rows
            if more and left:
                yield _line(f"and {more} more", style="dim")
                left -= 1
        if not view.front.trials or left < 3:
            return
        yield Text("")
        left -= 1
        members = len(view.front.trials)
        rows = min(left, _MOST_PLOT_ROWS)
        table = _front_table(view.front, rows)
        beside = width - table.width - 2
        if (
            plots
            and beside >= _PLOT_COLUMNS
            and left >= _PLOT_ROWS
            and (plot := self._drawn(view, beside, rows))
        ):
            both = Table.grid(padding=(0, 2))
            both.add_column(width=max(map(len, plot.splitlines())))
            both.add_column(width=table.width)
            both.add_row(Text(plot, no_wrap=True), table)
            yield both
            return
        table_rows = min(members, max((left - _PLOT_ROWS) // 2, 3)) + 1
        if plots and width >= _PLOT_COLUMNS and left >= _PLOT_ROWS + table_rows:
            plot = self._drawn(view, width, min(left - table_rows, _MOST_PLOT_ROWS))
            if plot:
                yield Text(plot, no_wrap=True)
                left -= len(plot.splitlines())
        yield _front_table(view.front, left)

    def _drawn(self, view: StudyView, width: int, height: int) -> str:
        key = (len(view.records), width, height)
        if self._plot[0] != key:
            self._plot = key, front_plot(view.front, view.records, width, height)
        return self._plot[1]


def _phrases(text: str, width: int) -> str:
    """As many of its phrases as fit a line; of the first one, what fits."""
    phrases = text.split(", ")
    while len(phrases) > 1 and cell_len(", ".join(phrases)) > width:
        phrases.pop()
    return ", ".join(phrases)


def _line(text: str, style: str = "") -> Text:
    return Text(plain(text), style=style, no_wrap=True, overflow="ellipsis")


def _head(view: StudyView, width: int) -> Iterable[ConsoleRenderable]:
    """Progress, time left, and how trials ended; one row more where it is narrow."""
    counts = f"{out_of(view.counted, view.trials)} trials"
    left = f", about {seconds(view.eta_s)} left" if view.eta_s else ""
    times = f"{seconds(view.elapsed_s)} so far{left}"
    name = Text(plain(view.name), style="bold")
    name.truncate(max(width // 4, 1), overflow="ellipsis")
    bar = min(width - name.cell_len - len(f"{counts}, {times}") - 4, 2 * _BAR)
    if bar >= _BAR // 2:
        head = Table.grid(padding=(0, 2))
        head.add_row(name, _bar(view, bar), f"{counts}, {times}")
        yield head
    else:
        yield _line(f"{view.name}: {counts}", style="bold")
        yield _line(times)
    plan = "" if view.deadline is None else deadline_line(view.deadline)
    for text in filter(None, (plan, outcome_words(view.outcomes), view.driver)):
        yield _line(_phrases(text, width), style="dim")


def _bar(view: StudyView, width: int) -> ProgressBar:
    """How far the study is: in its time where it has a deadline, else in its trials."""
    deadline = view.deadline
    if deadline is not None:
        return ProgressBar(deadline.ends_at - deadline.began_at, time.time() - deadline.began_at, width=width)
    return ProgressBar(total=view.trials, completed=view.counted, width=width)


def _running_table(trials: Iterable[RunningTrial], metric: str, width: int) -> Table:
    trials, bar = [*trials], _BAR if width >= _WIDE else _BAR // 2
    each = {
        "trial": [f"trial {trial.number}" for trial in trials],
        "bar": ["━" * bar] * len(trials),
        "batch": [f"B {trial.effective_batch}" for trial in trials],
        "rate": [f"rate {trial.learning_rate:.3g}" for trial in trials],
        "score": ["" if trial.score is None else f"{metric} {number(trial.score)}" for trial in trials],
        "left": ["" if trial.left_s is None else f"{seconds(trial.left_s)} left" for trial in trials],
        "where": [plain(trial.where) for trial in trials],
    }
    worth = ("trial", "score", "batch", "bar", "left", "rate", "where")
    widths = Fitted((Column(name, tuple(cells)) for name, cells in each.items()), worth, headed=False).widths(
        width
    )
    table, names = Table.grid(padding=(0, 2)), [*each]
    for taken in widths.values():
        table.add_column(width=taken, no_wrap=True, overflow="crop")
    for row, trial in enumerate(trials):
        drawn = ProgressBar(total=1.0, completed=trial.share, width=bar)
        table.add_row(*(drawn if names[at] == "bar" else each[names[at]][row] for at in widths))
    return table


def _front_table(front: ParetoFront, rows: int) -> Fitted:
    """As many members of the front as fit so many rows: both ends, and evenly spaced ones between."""
    shown: dict[str, str] = {"trial": "trial", front.metric: front.metric, "": ""}
    shown |= {"effective_batch": "batch", "learning_rate": "rate"}
    shown[front.speed] = front.speed
    worth = ("trial", front.metric, "", "batch", front.speed)

    def table(most: int) -> Fitted:
        columns = front_columns(front, some_members(front, max(most, 1)))
        kept = (
            replace(column, name=shown[column.name], flows=False)
            for column in columns
            if column.name in shown
        )
        return Fitted(kept, worth, named=False)

    return table(rows - table(rows).head_rows)


class _Reflowed(Live):
    """A live picture that survives its terminal becoming narrower: the rows it wrapped into are erased too."""

    def __init__(self, picture: Picture, console: Console) -> None:
        # No ellipsis of rich's: the picture is never higher than the terminal.
        super().__init__(
            picture, console=console, refresh_per_second=4, transient=True, vertical_overflow="crop"
        )
        self._picture, self._width = picture, console.width

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        width = self.console.width
        if width < self._width and self._live_render._shape is not None:
            rows = sum(max(ceil(cells / width), 1) for cells in self._picture.widths)
            self._live_render._shape = (width, min(rows, self.console.height))
        self._width = width
        return super().process_renderables(renderables)


class LiveView:
    """Shows a study while it runs: a picture on a terminal; a line per trial in a pipe, a file or a dumb terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._draws = console.is_terminal and not console.is_dumb_terminal
        self._stop: Callable[[], None] | None = None  # once there is a picture
        self._run: StudyRun | None = None
        self._line, self._begun = threading.Lock(), threading.Event()

    def __enter__(self) -> LiveView:
        if self._draws:
            threading.Thread(target=self._count, name="bsearch-seconds", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._clear()
        if self._stop is not None:
            self._stop()

    def _count(self) -> None:
        """Seconds that move until there is a picture: starting Ray, the examination and timing take a while."""
        begun = time.monotonic()
        while not self._begun.wait(1.0):
            self._write(f"\r{time.monotonic() - begun:.0f} s ")

    def _clear(self) -> None:
        """End the seconds, whose line is used for something else."""
        self._write("\r\x1b[K", self._begun.set)

    def _write(self, text: str, then: Callable[[], object] = lambda: None) -> None:
        with self._line:
            if self._draws and not self._begun.is_set():
                self._console.file.write(text)
                self._console.file.flush()
            then()

    def show(self, view: Callable[[], StudyView | None]) -> None:
        """Draw this view repeatedly until the end."""
        self._clear()
        if self._draws:
            live = _Reflowed(Picture(view), self._console)
            self._stop = live.stop
            live.start(refresh=True)

    def watch(self, run: StudyRun) -> None:
        self._run = run
        if run.ended.done:
            self.say(f"resuming: {out_of(run.ended.counted, run.spec.budget.trials, ' of ')} trials are done")
        # Not before: while devices are profiled there is nothing to draw, and SIGTERM would leave a hidden cursor.
        self.show(run.view)

    def say(self, text: str) -> None:
        """A line that stays, above the picture where there is one."""
        self._write("\r\x1b[K", lambda: self._console.print(text, markup=False))

    def notify(self, event: Event) -> None:
        if event.kind == "message":
            self.say(event.text)
        elif event.kind == "ended" and event.record is not None and self._run is not None:
            run = self._run
            self.ended(
                event.record, run.ended.counted, run.spec.budget.trials, run.spec.objectives.metric.name
            )

    def ended(self, record: TrialRecord, counted: int, trials: int, metric: str) -> None:
        """A trial ended: where the picture shows that, only failures get a line."""
        if self._stop is None or record.outcome == "error":
            self.say(trial_end_line(record, counted, trials, metric))


class NotebookView(LiveView):
    """Shows a study in a notebook: one output that is updated in place, and messages below it."""

    def __init__(self) -> None:
        super().__init__(
            Console(width=_NOTEBOOK_COLUMNS, height=_NOTEBOOK_ROWS, force_jupyter=False, file=io.StringIO())
        )

    def show(self, view: Callable[[], StudyView | None]) -> None:
        from IPython.display import display

        picture, over = Picture(view), threading.Event()
        handle = display(_as_html(picture), display_id=True)

        def refresh() -> None:
            while not over.wait(_NOTEBOOK_REFRESH_S):
                handle.update(_as_html(picture))

        thread = threading.Thread(target=refresh, name="bsearch-notebook", daemon=True)
        thread.start()

        def stop() -> None:
            over.set()
            thread.join()
            handle.update(_as_html(picture))

        self._stop = stop

    def say(self, text: str) -> None:
        print(plain(text))


def _as_html(picture: Picture) -> Any:
    from IPython.display import HTML

    console = Console(
        width=_NOTEBOOK_COLUMNS, height=_NOTEBOOK_ROWS, file=io.StringIO(), record=True, force_jupyter=False
    )
    console.print(picture)
    text = console.export_html(inline_styles=True, code_format="<pre style='line-height:1.2'>{code}</pre>")
    return HTML(text)


class _Silent:
    """Shows nothing."""

    def notify(self, event: Event) -> None: ...

    def watch(self, run: StudyRun) -> None: ...


@contextmanager
def open_progress(shown: bool = True) -> Iterator[LiveView | _Silent]:
    """The progress display that works here: in a notebook, on a terminal, in a pipe; or none."""
    if not shown:
        yield _Silent()
        return
    with NotebookView() if in_notebook() else LiveView(terminal()) as view:
        yield view


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and shell.__class__.__name__ == "ZMQInteractiveShell"


def _in_time(record: TrialRecord) -> str:
    """The time of its full training, and what it is where the trial did not spend it.

    >>> from bsearch.spaces.record import TrialFacts
    >>> _in_time(TrialRecord(3, "stopped", {}, TrialFacts(stopped_fraction=0.4), train_s=12.0))
    'after 40 % of its budget (about 12 s for all of it)'
    """
    share, whole = record.trained_share, seconds(record.train_s)
    if record.outcome not in ("stopped", "paused") or share == 1:
        return f"in {whole}"
    known = record.facts.train_s_source == "known"
    return f"after {100 * share:.0f} % of its budget ({'' if known else 'about '}{whole} for all of it)"


def trial_end_line(record: TrialRecord, counted: int, trials: int, metric: str) -> str:
    """How a trial ended, in a line."""
    if record.accuracy is not None:
        result = f"{metric} {number(record.accuracy)} {_in_time(record)}"
    else:
        result = record.message.splitlines()[0] if record.message else ""
    ended = f"[{out_of(counted, trials)}] trial {record.number} {record.outcome}: {result}"
    return " · ".join([ended, *setting_words(record)])
