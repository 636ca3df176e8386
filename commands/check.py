"""The command that checks a study or this machine."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ..search.report.completion import study_files
from ..search.report.stdio.answer import give_answer
from ..search.report.stdio.console import give, json_text, terminal
from ..spaces.boundary.storage import storage_of
from ..spaces.readable import plural, shell_word
from ..spaces.study.spec import StudySpec
from .group import FAILED, documents_only, epilog, located_faults, main
from .options import batch_option, json_option, serial_option, set_option, study_in


@main.command(
    epilog=epilog(
        "bsearch check study.yaml\n  bsearch check study.yaml --batch 500\n  bsearch check\n"
        "  bsearch check --schema > study.schema.json"
    )
)
@click.argument(
    "study", metavar="[STUDY]", required=False, type=click.Path(path_type=Path), shell_complete=study_files
)
@batch_option(
    "how a step is split into shares and micro-batches, its rates, time and memory; may be repeated."
)
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
    if (
        (schema and study is not None)
        or (machine and batches)
        or (serial and study is not None and not machine)
    ):
        raise click.UsageError(
            "expected --schema without STUDY, --machine without --batch, and --serial with --machine alone"
        )
    if schema:
        document = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            **StudySpec.model_json_schema(),
        }
        give(json_text(document))
        return
    if study is None and (batches or settings):
        raise click.UsageError(
            f"{'--batch' if batches else '--set'} needs a STUDY; in Python: bsearch.plan_batch"
        )
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
        steps = [
            batch_document(spec, profile, batch, devices)
            for batch in batches
            for devices in spec.devices.counts
        ]
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
        counts = [
            plural(count, state) for state, count in document["counts"].items() if count and state != "ok"
        ]
        console.print(", ".join(counts) or "No problems found.")
    return FAILED if document["counts"]["problem"] else 0
