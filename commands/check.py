"""Commands that check: a study, this machine, and what bsearch claims."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click
from rich.console import Console

from ..search.report.completion import study_files
from ..search.report.stdio.answer import give_answer
from ..search.report.stdio.console import give, json_text, terminal
from ..spaces.boundary.storage import storage_of
from ..spaces.errors import OutputError, StudyFileError
from ..spaces.readable import plural, shell_word
from ..spaces.study.spec import StudySpec
from .group import FAILED, documents_only, epilog, located_faults, main
from .options import batch_option, json_option, out_option, serial_option, set_option, study_in

if TYPE_CHECKING:
    from ..verify.report import Report, StageReport
    from ..verify.run import Planned


@main.command(
    epilog=epilog(
        "bsearch check study.yaml\n  bsearch check study.yaml --batch 500\n  bsearch check\n"
        "  bsearch check --schema > study.schema.json"
    )
)
@click.argument("study", metavar="[STUDY]", required=False, type=click.Path(path_type=Path), shell_complete=study_files)
@batch_option("how a step is split into shares and micro-batches, its rates, time and memory; may be repeated.")
@click.option("--machine", is_flag=True, help="Only what keeps STUDY from running on this machine.")
@serial_option("check this machine without it, since starting it takes several seconds.")
@click.option("--schema", is_flag=True, help="Print the JSON Schema of study files, for editors.")
@set_option
@json_option
@click.pass_context
def check(
    ctx: click.Context,
    study: Path | None,
    batches: tuple[int, ...],
    machine: bool,
    serial: bool,
    schema: bool,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Validate the study in STUDY and forecast it: a few timed steps, no training.

    Prints how a few batch sizes would be trained, the fastest and slowest trial, the duration of the study,
    the range of training times on the front, and advice.

    Without STUDY, check this machine for problems that keep studies from running, and say how to fix them: versions, cores,
    memory, GPUs, limits, disks, the storage, and whether Ray starts (with STUDY and --machine: whether it is reached at
    cluster.address). Changes nothing and leaves nothing running. Exit code 1 if there is a problem.
    """
    if (schema and study is not None) or (machine and batches) or (serial and study is not None and not machine):
        raise click.UsageError("expected --schema without STUDY, --machine without --batch, and --serial with --machine alone")
    if schema:
        document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **StudySpec.model_json_schema()}
        give(json_text(document))
        return
    if study is None and (batches or settings):
        raise click.UsageError(f"{'--batch' if batches else '--set'} needs a STUDY; in Python: bsearch.plan_batch")
    if study is None or machine:
        ctx.exit(_check_machine(None if study is None else study_in(study, settings), serial, as_json))
    _check_study(study, study_in(study, settings), batches, as_json)


def _check_study(study: Path, spec: StudySpec, batches: tuple[int, ...], as_json: bool) -> None:
    from ..search.preview.check import check_study
    from ..search.report.terminal.forecast import check_document, forecast_parts
    from ..search.report.terminal.plan import batch_document, batch_parts

    console = terminal(as_json)
    with located_faults(study), documents_only(as_json):
        checked = check_study(spec)
        profile = next(iter(checked.profiles.values()))
        steps = [batch_document(spec, profile, batch, devices) for batch in batches for devices in spec.devices.counts]
    if as_json:
        give_answer("check", {**check_document(spec, checked), "batches": steps}, "plans", "batches")
        return
    for step in steps:
        for part in batch_parts(step):
            console.print(part)
    for part in () if steps else forecast_parts(shell_word(study), spec, checked):
        console.print(part)


def _check_machine(spec: StudySpec | None, serial: bool, as_json: bool) -> int:
    """Check this machine, for a study or for any; the exit code."""
    from ..search.preview.doctor import doctor_document, examined, finding_line, machine_checks

    checks = machine_checks(spec, storage_of(os.environ) if spec is None else spec.storage)
    if not serial:
        from ..cluster.doctor import ray_findings
        from ..spaces.study.cluster import Cluster
        from ..spaces.study.devices import Devices

        cluster, devices = (Cluster(), Devices()) if spec is None else (spec.cluster, spec.devices)
        checks.append(("ray", lambda: ray_findings(cluster, devices)))
    console = terminal(as_json)
    findings = []
    for finding in examined(checks):
        findings.append(finding)
        if not as_json:
            console.print(finding_line(finding))
    document = doctor_document(findings)
    if as_json:
        give_answer("machine", document, "findings")
    else:
        counts = [plural(count, state) for state, count in document["counts"].items() if count and state != "ok"]
        console.print(", ".join(counts) or "No problems found. `bsearch verify` measures what holds on this machine.")
    return FAILED if document["counts"]["problem"] else 0


@main.command(epilog=epilog("bsearch verify --stage smoke\n  bsearch verify --quick"))
@click.option("--quick", is_flag=True, help="About four minutes: fewer cases, less time for each.")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "gpu"]), default="auto", help="What to verify on; default: a GPU if any."
)
@click.option("--stage", "stages", multiple=True, metavar="NAME", help="Only this stage; may be repeated.")
@serial_option("the study runs in this process.")
@out_option("a file, .md or .json; default: bsearch-verify-<card>-<date>.md.")
@click.pass_context
def verify(ctx: click.Context, quick: bool, device: str, stages: tuple[str, ...], serial: bool, out: Path | None) -> None:
    """Measure on this machine what bsearch claims: memory, step times, exactness, a study that is killed and resumes.

    The first stage, smoke, says within half a minute whether bsearch works on the card at all; where it does not, the others
    do not run. All take ten minutes on a GPU or a CPU, alone on the machine. Prints every claim with its bound and the value
    measured here, and writes a report that can be sent to the project. A value that misses its bound by less than its
    uncertainty, or is more uncertain than its bound, is reported as unclear. Exit code 1 if a claim fails or a stage does not
    finish.
    """
    if out is not None and out.suffix not in (".json", ".md"):
        raise OutputError(f"--out {out}: expected a file that ends in .json or .md")
    from ..objectives.machine.gpus import UsableGpus, usable_gpus
    from ..verify.machine import report_here, where_to_send
    from ..verify.report import SMOKE
    from ..verify.run import chosen
    from ..verify.run import verify as run_stages

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
        console.print("The other stages measure what holds of CUDA; of this accelerator there is the first one.")
    run_stages(report, stages, quick=quick, serial=serial, on_stage=partial(_after_stage, path, report, console))
    _print_verification(report, console)
    console.print(f"Written to {path}: {where_to_send()}.")
    ctx.exit(0 if report.holds else FAILED)


def _write_verification(path: Path, report: Report) -> None:
    from ..spaces.boundary.files import write_file

    write_file(path, json.dumps(report.to_dict(), indent=2) + "\n" if path.suffix == ".json" else report.document())


def _after_stage(path: Path, report: Report, console: Console, planned: Planned, stage: StageReport | None) -> None:
    """Show a stage that begins (None) or has ended."""
    from ..verify.report import SMOKE

    if stage is None:
        console.print(f"{planned.name:<18} {planned.about} ...", end="\r" if console.is_terminal else "\n")
        return
    _write_verification(path, report)  # after every stage, so that an interrupted run leaves what it found
    console.print(f"{planned.name:<18} {planned.about}: {stage.outcome} ({stage.seconds:.0f} s)")
    if planned.name == SMOKE:
        console.print(report.verdict)


def _print_verification(report: Report, console: Console) -> None:
    from ..search.report.terminal.fitted import Fitted

    names = ("stage", "claim", "bound", "measured", "verdict")
    console.print(f"\n{report.device} · {report.versions}", style="bold")
    console.print(
        Fitted.of_rows(
            names, report.rows(), ("stage", "claim", "verdict", "measured"), words=names, flows=("claim", "measured")
        )
    )
    console.print("\n" + report.summary)
