"""What bsearch claims, measured on this machine, from a checkout:

python -m bsearch.benchmarks.verify                # ten minutes; --quick: four
python -m bsearch.benchmarks.verify --serial       # where Ray is not installed
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Literal

import click
from rich.console import Console

from ...commands.group import FAILED, epilog, main
from ...commands.options import out_option, serial_option
from ...objectives.machine.gpus import UsableGpus, usable_gpus
from ...search.report.stdio.console import terminal
from ...search.report.terminal.fitted import Fitted
from ...spaces.boundary.files import write_file
from ...spaces.errors import OutputError, StudyFileError
from .machine import report_here
from .report import SMOKE, Report, StageReport
from .run import Planned, chosen
from .run import verify as run_stages

PROGRAM = "python -m bsearch.benchmarks.verify"
program = type(main)()  # with the errors and exit codes of `bsearch`


@program.command(PROGRAM, epilog=epilog(f"{PROGRAM} --quick"))
@click.option("--quick", is_flag=True, help="About four minutes: fewer cases, less time for each.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "gpu"]),
    default="auto",
    help="What to verify on; default: a GPU if any.",
)
@click.option("--stage", "stages", multiple=True, metavar="NAME", help="Only this stage; may be repeated.")
@serial_option("the study runs in this process.")
@out_option("a file, .md or .json; default: bsearch-verify-<card>-<date>.md.")
@click.pass_context
def verify(
    ctx: click.Context, quick: bool, device: str, stages: tuple[str, ...], serial: bool, out: Path | None
) -> None:
    """Measure on this machine what bsearch claims: memory, step times, exactness, a study that is killed and resumes.

    The first stage, smoke, says within half a minute whether bsearch works on the card at all; where it does not, the others
    do not run. All take ten minutes on a GPU or a CPU, alone on the machine. Prints every claim with its bound and the value
    measured here, and writes a report that can be sent to the project. A value that misses its bound by less than its
    uncertainty, or is more uncertain than its bound, is reported as unclear. Exit code 1 if a claim fails or a stage does not
    finish.
    """
    if out is not None and out.suffix not in (".json", ".md"):
        raise OutputError(f"--out {out}: expected a file that ends in .json or .md")
    console = terminal()
    usable = UsableGpus() if device == "cpu" else usable_gpus()
    if device == "gpu" and not usable.gpus:
        raise StudyFileError(
            f"--device gpu: torch can use no GPU: {usable.reason or 'there is none'}; `bsearch check` says more"
        )
    if usable.reason and not usable.gpus:
        console.print(f"Verifying on the CPU: torch can use no GPU: {usable.reason}")
    kind: Literal["cpu", "gpu"] = "gpu" if usable.gpus else "cpu"
    chosen(stages, kind, quick=quick)  # a wrong name is refused before anything is written
    report = report_here(kind, usable.gpus[0].name if usable.gpus else "")
    path = out or report.file()
    if report.busy:
        console.print(report.busy)
    _write_verification(path, report)
    if kind == "gpu" and not stages and not usable.gpus[0].is_cuda:
        stages = (SMOKE,)
        console.print(
            "The other stages measure what holds of CUDA; of this accelerator there is the first one."
        )
    run_stages(
        report, stages, quick=quick, serial=serial, on_stage=partial(_after_stage, path, report, console)
    )
    _print_verification(report, console)
    console.print(f"Written to {path}: attach it to an issue of the project.")
    ctx.exit(0 if report.holds else FAILED)


def _write_verification(path: Path, report: Report) -> None:
    write_file(
        path, json.dumps(report.to_dict(), indent=2) + "\n" if path.suffix == ".json" else report.document()
    )


def _after_stage(
    path: Path, report: Report, console: Console, planned: Planned, stage: StageReport | None
) -> None:
    """Show a stage that begins (None) or has ended."""
    if stage is None:
        console.print(f"{planned.name:<18} {planned.about} ...", end="\r" if console.is_terminal else "\n")
        return
    _write_verification(path, report)  # after every stage, so that an interrupted run leaves what it found
    console.print(f"{planned.name:<18} {planned.about}: {stage.outcome} ({stage.seconds:.0f} s)")
    if planned.name == SMOKE:
        console.print(report.verdict)


def _print_verification(report: Report, console: Console) -> None:
    names = ("stage", "claim", "bound", "measured", "verdict")
    console.print(f"\n{report.device} · {report.versions}", style="bold")
    console.print(
        Fitted.of_rows(
            names,
            report.rows(),
            ("stage", "claim", "verdict", "measured"),
            words=names,
            flows=("claim", "measured"),
        )
    )
    console.print("\n" + report.summary)


if __name__ == "__main__":
    program([PROGRAM, *sys.argv[1:]], prog_name="")
