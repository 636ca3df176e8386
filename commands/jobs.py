"""Commands about batch jobs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..search.report.completion import study_files
from ..search.report.stdio.answer import give_answer
from ..search.report.stdio.console import give, say, terminal
from ..search.report.stdio.streams import ends_with_reader
from ..search.report.terminal.fitted import Fitted
from ..spaces.boundary.storage import storage_of
from ..spaces.errors import NoStudyError, StorageError
from ..spaces.readable import shell_word
from ..spaces.study.file import read_study
from .group import epilog, located_faults, main
from .options import json_option, set_option, study_keys

if TYPE_CHECKING:
    from ..cluster.submit.submitter import Submitter


_launcher_option = click.option(
    "--launcher",
    metavar="NAME",
    help="ray, ray@http://host:8265 (its dashboard), slurm or a plug-in; default: the study's submit.launcher.",
)


@main.command(epilog=epilog("bsearch submit study.yaml --launcher slurm --set submit.nodes=2 --dry-run"))
@click.argument("study", type=click.Path(path_type=Path), shell_complete=study_files)
@_launcher_option
@set_option
@click.option("--dry-run", is_flag=True, help="Print the script or request, and submit nothing.")
def submit(study: Path, launcher: str | None, settings: tuple[str, ...], dry_run: bool) -> None:
    """Send the study in STUDY to a cluster as a batch job: `bsearch run` there, with Ray over all its machines.

    Submitting again resumes the study, however the job ended. docs/clusters.md lists what each launcher needs.
    """
    from ..cluster.submit.submitter import Submission, open_submitter

    keys = study_keys(settings)
    if other := next((section for section in keys if section != "submit"), None):
        raise click.UsageError(
            f"--set: expected keys of submit, since the job runs the study's file; got one of {other}"
        )
    with located_faults(study):
        changes = keys.get("submit", {}) | ({} if launcher is None else {"launcher": launcher})
        submission = Submission.read(study, storage_of(os.environ), changes)
        submitter = open_submitter(submission.settings)
        plan = submitter.plan(submission)
        for note in plan.notes:
            say(note, err=True)
        if dry_run:
            give(plan.text)
            return
        job = submitter.submit(submission)
    say(f"submitted study {job.study} to {job.launcher} as job {job.id}")
    launcher = shell_word(f"{job.launcher}{'@' * bool(submitter.place)}{submitter.place}")
    where = f"{job.id} --launcher {launcher}"
    say(
        f"Next:\n  bsearch jobs status {where}\n  bsearch jobs logs {where} --follow\n  bsearch jobs stop {where}"
    )


@main.group(
    epilog=epilog(
        "bsearch jobs status --launcher slurm\n  bsearch jobs logs 4711 --launcher slurm --follow\n"
        "  bsearch jobs stop 4711 --study study.yaml"
    )
)
def jobs() -> None:
    """Manage the jobs that `submit` sent: status, logs, stop.

    The cluster is given by --launcher, or by the submit section of the study file in --study.
    """


def _launcher_options(command: Any) -> Any:
    for option in (
        click.option(
            "--study",
            "study_file",
            type=click.Path(path_type=Path),
            shell_complete=study_files,
            help="Study file whose submit section holds these settings.",
        ),
        _launcher_option,
    ):
        command = option(command)
    return command


def _submitter(launcher: str | None, study_file: Path | None) -> Submitter:
    from ..cluster.submit.submitter import open_submitter, submit_settings

    with located_faults(study_file):
        return open_submitter(submit_settings(study_file, {"launcher": launcher}))


def _progress(names: set[str], study_file: Path | None) -> dict[str, dict[str, Any]]:
    """The progress of these studies, by name; of none where no storage is known, or it cannot be read here."""
    from ..search.report.terminal.watch import progress_facts, studies_now

    storage = storage_of(os.environ)
    if storage is None and study_file is not None:
        storage = read_study(study_file).storage
    if storage is None or not names:
        return {}
    try:
        return {name: progress_facts(view) for name, view in studies_now(storage, names).items()}
    except NoStudyError:
        return {}  # its job has not begun, or writes elsewhere
    except StorageError as error:
        say(f"progress is unknown: {error}", err=True)
        return {}


@jobs.command(
    "status",
    epilog=epilog("bsearch jobs status --launcher slurm\n  bsearch jobs status 4711 --study study.yaml"),
)
@click.argument("id", required=False)
@_launcher_options
@json_option
def job_status(id: str | None, as_json: bool, **where: Any) -> None:
    """Print the state of job ID, or of all bsearch's jobs that the cluster knows, newest first; and their studies' progress.

    States are pending, running, succeeded, failed, stopped and unknown. Progress is read from the storage of the study file in
    --study, or from that in BSEARCH_STORAGE.
    """
    if id is not None:
        _print_job(id, as_json, where)
        return
    from ..spaces.readable import number, seconds

    found = _submitter(**where).jobs()
    progress = _progress({job.study for job in found}, where["study_file"])
    if as_json:
        give_answer(
            "jobs",
            {"jobs": [{**job.to_dict(), "progress": progress.get(job.study)} for job in found]},
            "jobs",
        )
        return
    if not found:
        say("no bsearch jobs there")
        return
    names = (
        "job",
        "study",
        "state",
        "submitted",
        "started",
        *(("trials", "best", "left") if progress else ()),
    )
    rows = []
    for job in found:
        cells = [job.id, job.study, job.state, _at(job.submitted), _at(job.started)]
        if (facts := progress.get(job.study)) is not None:
            best = "" if facts["best"] is None else f"{facts['metric']} {number(facts['best'])}"
            left = "" if facts["eta_s"] is None else seconds(facts["eta_s"])
            cells += [f"{facts['done']}/{facts['trials']}", best, left]
        rows.append([*cells, *[""] * (len(names) - len(cells))])
    terminal().print(
        Fitted.of_rows(names, rows, ("job", "state", "study", "trials", "best", "left"), words=names)
    )


def _at(time: datetime | None) -> str:
    return "" if time is None else time.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _print_job(id: str, as_json: bool, where: Mapping[str, Any]) -> None:
    from ..spaces.readable import number, seconds

    job = _submitter(**where).job(id)
    facts = _progress({job.study}, where["study_file"]).get(job.study)
    if as_json:
        give_answer("job", {**job.to_dict(), "progress": facts})
        return
    times = [
        f"{word} {_at(time)}"
        for word, time in (("submitted", job.submitted), ("started", job.started))
        if time
    ]
    say(f"job {job.id} of study {job.study}: {', '.join([job.state, *times])}")
    if facts is not None:
        parts = [f"{facts['done']} of {facts['trials']} trials are done"]
        parts += [] if facts["best"] is None else [f"the best {facts['metric']} is {number(facts['best'])}"]
        parts += [] if facts["eta_s"] is None else [f"about {seconds(facts['eta_s'])} left"]
        say(", ".join(parts))


@jobs.command("logs", epilog=epilog("bsearch jobs logs 4711 --launcher slurm --follow"))
@click.argument("id")
@click.option("-f", "--follow", is_flag=True, help="Follow until the job ends.")
@_launcher_options
def job_logs(id: str, follow: bool, **where: Any) -> None:
    """Print the output of job ID so far."""
    from ..cluster.submit.submitter import followed

    submitter = _submitter(**where)
    with ends_with_reader():
        for piece in followed(submitter, id) if follow else [submitter.logs(id)]:
            give(piece)


@jobs.command("stop", epilog=epilog("bsearch jobs stop 4711 --launcher slurm"))
@click.argument("id")
@_launcher_options
def stop_job(id: str, **where: Any) -> None:
    """Stop job ID. Its study keeps every finished trial; submitting it again resumes it."""
    _submitter(**where).stop(id)
    say(f"stopping job {id}")
