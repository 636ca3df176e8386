"""On a terminal of any usual width: no value or name is cut, no column goes without a word, and no word is broken."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import pytest
from bsearch.cli import main
from bsearch.commands import jobs as job_commands
from bsearch.search.analysis.pareto import front_of
from bsearch.search.laws.samples_by_batch import SamplesByBatch
from bsearch.search.laws.verdicts import Verdict
from bsearch.search.preview.doctor import Finding, finding_line
from bsearch.search.preview.forecast import PlannedBatch
from bsearch.search.report.stdio.console import terminal
from bsearch.search.report.terminal.ask import columns_table, group_parts, samples_parts
from bsearch.search.report.terminal.forecast import _plans_table
from bsearch.search.report.terminal.live import Picture
from bsearch.search.report.terminal.plan import batch_parts
from bsearch.search.report.terminal.plot import scatter
from bsearch.search.report.terminal.profile import memory_tables, speed_tables
from bsearch.search.report.terminal.tables import front_table, trial_parts, trials_table
from bsearch.search.run.view import RunningTrial, StudyView
from bsearch.search.sources.columns import Column, Columns
from bsearch.search.store.stored import StoredStudy
from bsearch.spaces.front import ParetoFront
from bsearch.spaces.laws.device import DeviceProfile
from bsearch.spaces.record import TrialFacts, TrialRecord
from bsearch.spaces.study.file import study_from_dict
from conftest import small_study
from rich.cells import cell_len
from rich.table import Table

WIDTHS = (60, 80, 120, 200)
# Wider than anything that is printed.
WHOLE = 2000
# What the line begins with that names the columns without room.
NOT_SHOWN = "Not shown"
MANY = {
    "weight_decay": 1.2345e-06,
    "label_smoothing": 0.12345,
    "dropout_probability": 0.25,
    "optimizer_of_the_head": "adamw",
}


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


Parts = Callable[[pytest.MonkeyPatch], Sequence[Any]]
Printed = Callable[[int, Any], str]


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Tty]:
    """Standard output and error as a terminal of so many columns."""

    def made(width: int) -> Tty:
        tty = Tty()
        for name, value in {
            "COLUMNS": str(width),
            "LINES": "40",
            "TERM": "xterm-256color",
            "NO_COLOR": "1",
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "stdout", tty)
        monkeypatch.setattr(sys, "stderr", tty)
        return tty

    return made


@pytest.fixture
def printed(screen: Callable[[int], Tty]) -> Printed:
    """What a command would print of a part on a terminal of so many columns, without its styles."""

    def text(width: int, part: Any) -> str:
        tty = screen(width)
        terminal().print(part)
        return unstyled(tty.getvalue())

    return text


def unstyled(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def words(text: str) -> set[str]:
    return {word.strip(",:;().") for word in text.split()} - {""}


def too_long(text: str, width: int) -> list[str]:
    """Lines that the terminal would break, wherever that is; a single word that is longer than a line cannot be helped."""
    return [line for line in text.splitlines() if cell_len(line) > width and len(line.split()) > 1]


def columns_of(part: Any) -> list[tuple[str, tuple[str, ...]]]:
    """A table's columns, each with its name and its cells, as they were before any was left out."""
    if isinstance(part, Table):
        return [(str(column.header), tuple(map(str, column._cells))) for column in part.columns]
    return [(column.name, tuple(map(str, column.cells))) for column in getattr(part, "columns", ())]


def faults(narrow: str, whole: str, width: int, part: Any) -> list[str]:
    """What is wrong with a part at a width, compared with all of it."""
    found = [f"cut: {line.strip()}" for line in narrow.splitlines() if "…" in line]
    found += [f"longer than the terminal: {line}" for line in too_long(narrow, width)]
    shown, _, left_out = narrow.partition(NOT_SHOWN)
    if fragments := words(shown) - words(whole):
        found.append(f"no words of it: {sorted(fragments)}")
    named = " ".join(left_out.replace("_", " ").split())
    for name, cells in columns_of(part):
        is_shown = words(name.replace("_", " ")) <= words(shown.replace("_", " ")) and words(
            " ".join(cells)
        ) <= words(shown)
        if not is_shown and (not name or " ".join(name.replace("_", " ").split()) not in named):
            found.append(f"a column is neither shown nor named: {name!r}")
    return found


def records(*, repeated: bool = False, many: bool = False) -> tuple[TrialRecord, ...]:
    """Trials with settings of usual lengths, some of which ended early with a sentence on why."""
    made = []
    for number in range(12):
        rule = ("linear", "sqrt", "adam_sde")[number % 3]
        facts = TrialFacts(
            effective_batch=1000 - 61 * number,
            micro_batch=250 - 15 * number,
            accumulation=4,
            learning_rate=0.1563 / (1 + number),
            rule=rule,
            epochs=2 + number,
            baseline=0 if number == 3 else None,
        )
        if repeated:
            interval = {"mean_low": 0.4 + number / 50, "mean_high": 0.5001 + number / 50}
            facts = replace(
                facts, runs=2, front_probability=0.86, ties=(0,) if number == 2 else None, **interval
            )
        outcome, message = "complete", ""
        if number in (5, 7):
            outcome, message = (
                "stopped",
                "stopped after 42% of its budget; predicted final value 0.6507 ± 0.44",
            )
        elif number == 9:
            outcome, message = (
                "error",
                "RuntimeError: Expected all tensors to be on the same device, but found cuda:0 and cpu",
            )
        settings: dict[str, Any] = {
            "effective_batch": facts.effective_batch,
            "rule": rule,
            **(MANY if many else {}),
        }
        made.append(
            TrialRecord(
                number,
                outcome,
                settings,
                facts,
                0.02333 * 1.7**number,
                0.45123 + number / 50,
                message=message,
            )  # type: ignore[arg-type]
        )
    return tuple(made)


def front(**kinds: bool) -> ParetoFront:
    return front_of(records(**kinds), "accuracy", "maximize")


def ask_columns() -> Columns:
    return Columns(
        (
            Column("learning_rate", "learning_rate"),
            Column("per_device_train_batch_size", "micro_batch"),
            Column("gradient_accumulation_steps", "accumulation"),
            Column("eval/validation_accuracy", "metric"),
            Column("weight_decay", "parameter"),
            Column("notes_by_a_colleague", "nothing", "a name or a place"),
            Column("cuda_version", "nothing", "the same in every run"),
        ),
        "maximize",
    )


def ask_group() -> Sequence[Any]:
    named = tuple(
        replace(
            record,
            facts=replace(
                record.facts, message=f"imported from runs.csv/run-of-a-long-name-{record.number:03}"
            ),
        )
        for record in records(many=True)
    )
    spec = study_from_dict(small_study())
    study = StoredStudy("", "runs", spec, {}, 0.0, named, front_of(named, "accuracy", "maximize"))
    said = "0.0155 [0.0047, 0.062] at batch 16; 0.234 [0.038, 0.45] at batch 512. It grows as the batch to the power of 0.65"
    settings = [{"effective_batch": 96, **MANY}]
    answers = [
        Verdict(
            "front",
            "5 of 30 are on the front; the other 25 were each beaten by one that was as fast and as good",
            30,
        ),
        Verdict("best rate", f"{said} [0.48, 0.88]: sqrt holds, constant and linear do not", 28),
        Verdict(
            "noise", "no setting was trained more than once, so what seeds change is unknown", silent=True
        ),
        Verdict("next runs", "", 30, data={"settings": settings}),
    ]
    return [*group_parts("runs.csv", study, None, answers, several=False, short=False)]


def samples() -> Sequence[Any]:
    import numpy as np

    draws = np.geomspace(4e3, 2.5e4, 60).reshape(20, 3)
    return [
        *samples_parts("digits", "accuracy", SamplesByBatch(0.95, (8, 128, 1000), draws, 3591.0, 23940.0, 14))
    ]


def batch() -> Sequence[Any]:
    share = {"samples": 2047, "micro_batches": [65] * 3 + [64] * 29, "weights": [0.0317] * 3 + [0.0312] * 29}
    document = {
        "effective_batch": 4095,
        "accumulation": 32,
        "micro_batch": 65,
        "activation_checkpointing": "full",
        "devices": [{"device": device, **share} for device in range(2)],
        "learning_rates": [{"rule": "adam_sde", "low": 0.0123456, "high": 1.23456}],
        "device": "NVIDIA H100 80GB HBM3",
        "training_set": 50_000,
        "step_s": 0.123,
        "epoch_s": 1.5,
        "interval": 0.021,
        "peak_bytes": 9_876_543_210,
        "limit_bytes": 10_737_418_240,
        "caches_embeddings": False,
    }
    return [*batch_parts(document)]


def plans() -> Sequence[Any]:
    profile = DeviceProfile("gpu", "NVIDIA H100 80GB HBM3", 1000, unit="tokens", units_per_sample=1024.0)
    each = [
        PlannedBatch(size, 4, 8, size // 32, "selective", 0.0123 * size, 75.2 * size)
        for size in (64, 512, 4096)
    ]
    return [_plans_table(each, profile)]


def speed() -> Sequence[Any]:
    timed = {
        "accumulation": 4,
        "micro_batch": 251,
        "step_s": 0.00298,
        "known_step_s": 0.00301,
        "input_s": 1e-4,
    }
    document = {
        "devices": 2,
        "interval": 0.456,
        "misfit": (0.011, 0.178),
        "activation_checkpointing": "selective",
        "embedding": "cached",
        "update_s": 2.12e-4,
        "communication_s": 1.1e-4,
        "timed": [{"effective_batch": size, "samples_per_s": 84_091.2, **timed} for size in (4, 1004)],
    }
    return [*speed_tables(document)]


def memory() -> Sequence[Any]:
    sizes, modes = (1, 316, 1000), ("none", "selective", "full")
    document = {
        "source": "counted",
        "bytes": "reserved",
        "note": "its model cannot be traced: data-dependent control flow in forward",
        "limit_bytes": 10_737_418_240,
        "headroom": 0.05,
        "largest_micro_batch": 1000,
        "largest_micro_batches": dict(zip(modes, (316, 1000, 1000), strict=True)),
        "evaluation_batch": 2000,
        "breakdown": {
            "parameters": 70_656,
            "gradients": 70_656,
            "optimizer state": 141_312,
            "activations": 4_099_932,
        },
        "curve": [
            {"micro_batch": size, "activation_checkpointing": mode, "predicted_bytes": 12_345_678 * size}
            | {"measured_bytes": 12_345_000 * size, "difference": 5.5e-5}
            for size in sizes
            for mode in modes
        ],
        "largest_effective_batch": {"1": 1000, "2": 2000, "4": 4000, "8": 8000, "16": 16_000, "32": 32_000},
    }
    return [*memory_tables(document)]


class Taken:
    """A console that keeps what it is to print."""

    def __init__(self) -> None:
        self.parts: list[Any] = []

    def print(self, *parts: Any, **options: Any) -> None:
        self.parts += parts


def jobs(monkeypatch: pytest.MonkeyPatch) -> Sequence[Any]:
    from bsearch.cluster.submit.submitter import Job

    at = datetime(2026, 11, 28, 9, 30, tzinfo=UTC)
    names = ("cifar-resnet-bf16", "digits")
    found = [Job(f"raysubmit_abcdefgh{name[:4]}", name, "ray", "running", at, at) for name in names]
    facts = {"done": 12, "trials": 60, "metric": "validation_accuracy", "best": 0.98765, "eta_s": 3723.0}
    taken = Taken()
    monkeypatch.setattr(
        job_commands, "_submitter", lambda **where: type("", (), {"jobs": lambda self: found})()
    )
    monkeypatch.setattr(job_commands, "_progress", lambda names, file: dict.fromkeys(names, facts))
    monkeypatch.setattr(job_commands, "terminal", lambda: taken)
    main(["jobs", "status", "--launcher", "slurm"], standalone_mode=False)
    return taken.parts


def trial() -> Sequence[Any]:
    record = records()[7]
    point = {
        "attempt": 0,
        "samples_seen": 123_456,
        "elapsed_s": 1234.5,
        "accuracy": 0.98765,
        "train_loss": 0.0004236,
    }
    document = {
        "trial": 7,
        "host": "node-017.cluster.example.org",
        "message": record.message,
        "curve": [point],
    }
    return [*trial_parts(document, record, "validation_accuracy")]


def finding() -> Sequence[Any]:
    advice = "free some, or set storage and results to another disk: results need about 2 GiB for 60 trials, and Ray needs more"
    return [
        finding_line(
            Finding("shared memory", "warning", "0.5 GiB of 1 GiB free, for what Ray shares", advice)
        )
    ]


TABLES: dict[str, Parts] = {
    "show": lambda _: [front_table(front())],
    "show, repeated": lambda _: [front_table(front(repeated=True))],
    "show, many parameters": lambda _: [front_table(front(many=True))],
    "show, many parameters, repeated": lambda _: [front_table(front(many=True, repeated=True))],
    "show --pick reaches": lambda _: [front_table(front(repeated=True), target=0.5)],
    "show --all": lambda _: [trials_table(records(), front())],
    "show --all, many parameters": lambda _: [trials_table(records(many=True), front(many=True))],
    "show --pick": lambda _: trial(),
    "ask, names": lambda _: [columns_table(ask_columns())],
    "ask": lambda _: ask_group(),
    "ask --until": lambda _: samples(),
    "check": lambda _: plans(),
    "check --batch": lambda _: batch(),
    "check, machine": lambda _: finding(),
    "profile, memory": lambda _: memory(),
    "profile, speed": lambda _: speed(),
    "jobs status": jobs,
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", TABLES)
def test_nothing_is_cut_lost_or_broken(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch, printed: Printed
) -> None:
    with monkeypatch.context() as made:
        parts = [part for part in TABLES[name](made) if not isinstance(part, str) or part]
    assert parts
    found = [
        fault for part in parts for fault in faults(printed(width, part), printed(WHOLE, part), width, part)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_the_rows_it_had(name: str, monkeypatch: pytest.MonkeyPatch, printed: Printed) -> None:
    """What is left out are columns: each row begins with the same words at any width."""
    with monkeypatch.context() as made:
        tables = [part for part in TABLES[name](made) if columns_of(part)]
    for table in tables:
        firsts = columns_of(table)[0][1]
        for width in WIDTHS:
            lines = [" ".join(line.split()) for line in printed(width, table).splitlines()]
            at = iter(lines)
            missing = [
                first for first in firsts if not any(line.startswith(" ".join(first.split())) for line in at)
            ]
            assert not missing, (width, missing)


def view(metric: str, where: str) -> StudyView:
    shown = front()
    running = tuple(RunningTrial(9 + more, where, 4096, 0.0123, 0.5, 0.7123, 4000.0, 1) for more in range(2))
    counts = {"complete": 9, "out_of_memory": 3, "stopped": 4}
    driver = "run by process 1234 on a-host since 2026-11-28 17:00, seen 0 s ago"
    return StudyView(
        "digits", 60, 9.0, counts, running, replace(shown, metric=metric), shown.trials, 100.0, 4000.0, driver
    )


@pytest.mark.parametrize("metric", ["accuracy", "validation_perplexity"])
@pytest.mark.parametrize("where", ["vm cpu", "gpu-node-017.cluster.example.org 4 gpus"])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_picture_of_a_running_study_cuts_nothing(
    width: int, where: str, metric: str, printed: Printed
) -> None:
    shown, whole = (printed(columns, Picture(lambda: view(metric, where))) for columns in (width, WHOLE))
    assert "…" not in shown
    assert not too_long(shown, width)
    # Rows of running trials, and of the front, are made of the words that they have where there is room for all.
    rows = [
        line
        for line in shown.splitlines()
        if line.startswith("trial ") and not any(letter in line for letter in "│┤")
    ]
    assert rows and words("\n".join(rows)) <= words(whole) | {"━" * count for count in range(40)}
    assert re.search(r"trial 9 .*0\.7123", shown)  # the value is what it is looked at for


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "label", ["accuracy", "validation_perplexity", "bits_per_byte_of_the_held_out_corpus"]
)
def test_a_plot_fits_and_names_both_axes(width: int, label: str) -> None:
    points = {"o": [(0.0123 * 3**x, 0.5 + x / 10) for x in range(5)]}
    plot = scatter(points, width=width, height=16, x_label="train_s (o front, * baseline)", y_label=label)
    assert not too_long(plot, width)
    assert {*label.split(), "train_s", "front", "baseline"} <= words(plot)
    assert sum(line.count("o") for line in plot.splitlines() if line.endswith("│")) == 5


SENTENCES = [
    "Best accuracy: 0.9867 in 0.44 s (trial 9). Fastest within 1 % of it: trial 4, 0.98 in 85.7 ms, which is 81% less time.",
    "4 of 14 trials took 137 % more time than predicted (median): waiting for a core took 40 % of training, and other programs "
    "used 41 % of the machine. The front uses the predicted times, so it is not affected.",
    "wrote /a/folder/whose/name/is/longer/than/any/line/of/a/narrow/terminal/so/that/it/has/to/be/broken/somewhere/front.csv",
]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("sentence", SENTENCES)
def test_prose_breaks_between_words(sentence: str, width: int, printed: Printed) -> None:
    shown = printed(width, sentence)
    assert not too_long(shown, width)
    if all(len(word) <= width for word in sentence.split()):
        assert shown.split() == sentence.split()


def outputs(
    screen: Callable[[int], Tty], width: int, commands: Sequence[Sequence[str]]
) -> Iterator[tuple[str, str]]:
    """What commands print, on both streams."""
    for command in commands:
        tty = screen(width)
        with suppress(click.exceptions.Exit, SystemExit):
            main([*command], standalone_mode=False)
        yield " ".join(command), unstyled(tty.getvalue())


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS[::3])
def test_the_commands_that_look_at_a_study_fit(
    width: int, finished_study: Path, screen: Callable[[int], Tty]
) -> None:
    study = str(finished_study)
    commands = [
        ["show", study],
        ["show", study, "--all"],
        ["show", study, "--pick", "0"],
        ["show", study, "--pick", "reaches:0.5"],
        ["show", study, "--pick", "4711"],  # an error
        ["ask", study],
        ["check", study],
        ["check", study, "--batch", "100"],
    ]
    found = []
    for command, text in outputs(screen, width, commands):
        assert text.strip(), command
        found += [f"{command}: {line}" for line in text.splitlines() if "…" in line]
        found += [f"{command}: {line}" for line in too_long(text, width) if study not in line]
    assert not found, "\n".join(found)
