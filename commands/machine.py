"""Commands about this machine and this program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import click
from click.shell_completion import get_completion_class
from rich.table import Table
from rich.text import Text

from ..search.report.completion import study_files
from ..search.report.stdio.console import terminal
from ..spaces.errors import OutputError, StudyFileError
from ..spaces.study.file import read_study
from ..spaces.study.spec import StudySpec
from .group import FAILED, epilog, main
from .options import json_option, storage_option


@main.command(epilog=epilog("bsearch doctor study.yaml\n  bsearch doctor --no-ray"))
@click.argument("study", metavar="[STUDY]", required=False, type=click.Path(path_type=Path), shell_complete=study_files)
@click.option("--no-ray", is_flag=True, help="Do not start or contact Ray, which takes several seconds.")
@storage_option
@json_option
@click.pass_context
def doctor(ctx: click.Context, study: Path | None, no_ray: bool, storage: str | None, as_json: bool) -> None:
    """Check this machine for problems that keep studies from running, and say how to fix them.

    Checks versions, cores, memory, GPUs, limits, disks, the storage, and whether Ray starts (with STUDY: whether it is
    reached at cluster.address). Changes nothing and leaves nothing running. Exit code 1 if there is a problem.
    """
    spec = None if study is None else read_study(study, storage=storage)
    from ..search.preview.doctor import doctor_document, examined, finding_line, machine_checks

    checks = machine_checks(spec, storage if spec is None else spec.storage)
    if not no_ray:
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
        click.echo(json.dumps(document, indent=2))
    else:
        counts = [f"{count} {state}s" for state, count in document["counts"].items() if count and state != "ok"]
        console.print(
            ", ".join(counts).replace("1 problems", "1 problem").replace("1 warnings", "1 warning")
            or "No problems found. `bsearch verify` measures what holds on this machine."
        )
    ctx.exit(FAILED if document["counts"]["problem"] else 0)


@main.command(epilog=epilog("bsearch verify --stage smoke\n  bsearch verify --quick"))
@click.option("--quick", is_flag=True, help="About four minutes: fewer cases, less time for each.")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "gpu"]), default="auto", help="What to verify on; default: a GPU if any."
)
@click.option("--stage", "stages", multiple=True, metavar="NAME", help="Only this stage; may be repeated.")
@click.option("--serial", is_flag=True, help="Run the study without Ray.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the report to this file, .md or .json; default: bsearch-verify-<card>-<date>.md.",
)
@json_option
@click.pass_context
def verify(
    ctx: click.Context, quick: bool, device: str, stages: tuple[str, ...], serial: bool, out: Path | None, as_json: bool
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
    from ..objectives.machine.gpus import UsableGpus, usable_gpus
    from ..spaces.boundary.files import write_file
    from ..verify.machine import report_here, where_to_send
    from ..verify.report import SMOKE, StageReport
    from ..verify.run import Planned, chosen
    from ..verify.run import verify as run_stages

    console = terminal(as_json)
    usable = UsableGpus() if device == "cpu" else usable_gpus()
    if device == "gpu" and not usable.gpus:
        raise StudyFileError(
            f"--device gpu: torch can use no GPU: {usable.reason or 'there is none'}; `bsearch doctor` says more"
        )
    if usable.reason and not usable.gpus:
        console.print(f"Verifying on the CPU: torch can use no GPU: {usable.reason}")
    kind: Literal["cpu", "gpu"] = "gpu" if usable.gpus else "cpu"
    chosen(stages, kind, quick=quick)  # a wrong name is refused before anything is written
    report = report_here(kind, usable.gpus[0].name if usable.gpus else "")
    path = out or report.file()
    if report.busy:
        console.print(report.busy)

    def write() -> None:
        document = json.dumps(report.to_dict(), indent=2) + "\n" if path.suffix == ".json" else report.document()
        write_file(path, document)

    def show(planned: Planned, stage: StageReport | None) -> None:
        if stage is None:
            console.print(f"{planned.name:<18} {planned.about} ...", end="\r" if console.is_terminal else "\n")
            return
        write()  # after every stage, so that an interrupted run leaves what it found
        console.print(f"{planned.name:<18} {planned.about}: {stage.outcome} ({stage.seconds:.0f} s)")
        if planned.name == SMOKE:
            console.print(report.verdict)

    write()
    if kind == "gpu" and not stages and not usable.gpus[0].is_cuda:
        stages = (SMOKE,)
        console.print("The other stages measure what holds of CUDA; of this accelerator there is the first one.")
    run_stages(report, stages, quick=quick, serial=serial, on_stage=show)
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    else:
        table = Table(
            "stage", "claim", "bound", "measured", "", box=None, pad_edge=False, title=f"\n{report.device} · {report.versions}"
        )
        for *cells, verdict in report.rows():
            table.add_row(*cells, Text(verdict, {"pass": "green", "unclear": "yellow"}.get(verdict, "bold red")))
        console.print(table)
        console.print("\n" + report.summary)
    console.print(f"Written to {path}: {where_to_send()}.")
    ctx.exit(0 if report.holds else FAILED)


@main.command(
    epilog=epilog(
        "bsearch completion bash > ~/.local/share/bash-completion/completions/bsearch\n"
        '  eval "$(bsearch completion zsh)"          # in ~/.zshrc, after compinit\n'
        "  bsearch completion fish > ~/.config/fish/completions/bsearch.fish"
    )
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that lets SHELL complete commands, options, study files, studies and launchers."""
    completer = get_completion_class(shell)
    assert completer is not None
    click.echo(completer(main, {}, "bsearch", "_BSEARCH_COMPLETE").source())


@main.command(epilog=epilog("bsearch schema > study.schema.json"))
def schema() -> None:
    """Print the JSON Schema of study files, for editors."""
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **StudySpec.model_json_schema()}
    click.echo(json.dumps(document, indent=2))
