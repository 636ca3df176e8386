"""What is seen while a study runs: a live table on a terminal, a line per trial elsewhere."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .study_run import Event, StudyRun
from .terminal import front_table, number, seconds


class LiveView:
    """What is seen while a study runs: a live table on a terminal, a line per trial elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._run: StudyRun | None = None
        self._messages: list[str] = []
        self._live: Live | None = None

    def __enter__(self) -> LiveView:
        if self._console.is_terminal:
            self._live = Live(console=self._console, get_renderable=self._picture, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def watch(self, run: StudyRun) -> None:
        self._run = run
        if run.done:
            self._console.print(f"going on: {run.counted} of {run.spec.budget.trials} trials are done")

    def notify(self, event: Event) -> None:
        if event.kind == "message":
            self._console.print(event.text)
        elif event.kind == "ended" and event.record is not None and self._run is not None:
            record, run = event.record, self._run
            if self._live is not None and record.outcome != "error":
                return
            values = {**record.facts, **record.parameters}
            metric = run.spec.objectives.accuracy.metric
            came = (
                f"{metric} {number(record.accuracy)} in {seconds(record.train_s)}"
                if record.accuracy is not None
                else record.message.splitlines()[0]
                if record.message
                else ""
            )
            settings = (
                f"B {values.get('effective_batch')} · rate {number(values.get('learning_rate'))} {values.get('rule', '')}"
            )
            self._console.print(
                f"[{run.counted}/{run.spec.budget.trials}] trial {record.number} {record.outcome}: {came} · "
                f"{settings} · epochs {values.get('epochs')}",
                markup=False,
            )

    def _picture(self) -> Any:
        run = self._run
        if run is None:
            return Text("...", style="dim")
        total, elapsed = run.spec.budget.trials, run.elapsed_s()
        here = run.counted - run.counted_before
        remaining = f", about {seconds(elapsed / here * (total - run.counted))} left" if here else ""
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(run.name, style="bold"),
            ProgressBar(total=total, completed=run.counted, width=24),
            Text(f"{run.counted}/{total} trials, {seconds(elapsed)} so far{remaining}"),
        )
        running = Table.grid(padding=(0, 2))
        for setup, measurement in run.running()[:8]:
            share = measurement.samples_seen / setup.samples_budget if measurement else 0.0
            score = number(measurement.score(setup.metric)) if measurement else ""
            running.add_row(
                f"trial {setup.number}",
                ProgressBar(total=1.0, completed=share, width=12),
                f"B {setup.effective_batch}",
                f"rate {setup.learning_rate:.3g}",
                score,
            )
        return Group(head, running, front_table(run.front(), most=12))
