"""The command's root: how errors become messages and exit codes, and where their results are."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

import click

from .. import __version__
from ..search.report.stdio.console import give, say, terminal
from ..search.report.stdio.streams import ReaderGoneError
from ..search.report.terminal.signals import handled_signals, is_termination, was_stopped
from ..spaces.boundary.secrets import masked
from ..spaces.boundary.storage import is_url
from ..spaces.errors import (
    BsearchError,
    ClusterError,
    LeftOutWarning,
    OutputError,
    StorageError,
    StudyFileError,
)

# Exit codes: 0 done, 1 the study failed, 2 bad input, 130 interrupted by Ctrl-C, 143 by SIGTERM or SIGHUP.
FAILED, BAD_INPUT, INTERRUPTED, TERMINATED = 1, 2, 130, 143
# Where a command's context holds its own exit code for all that fails, as 1 and 2 are answers of it.
FAILURE = "bsearch.failure"
# And whether programs read its answers.
AS_JSON = "bsearch.json"


# Each command's module, which is imported when it is called, and what `bsearch --help` says of it, by what it is for.
SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Start": {
        "ask": ("ask", "What runs that you already have can tell, a study's too."),
        "init": ("run", "Write a commented study.yaml and tasks.py."),
        "check": ("check", "Validate a study and forecast it; or check this machine."),
        "run": ("run", "Run a study, or resume it, and print its front."),
    },
    "Look": {
        "show": ("results", "The front, all trials, or one; --watch follows a run."),
        "report": ("results", "One HTML page with all results."),
        "dashboard": ("results", "The study in optuna-dashboard."),
    },
    "Decide": {
        "train": ("run", "Train a point of the front, and keep the model."),
        "export": ("results", "Tables, settings for other libraries, trials for trackers."),
        "compare": ("compare", "Whether a change is better, each side at its best."),
    },
    "Measure": {
        "profile": ("measure", "Predict memory and step time; time batch sizes."),
    },
    "Your agents": {
        "mcp": ("agents", "Serve a folder's studies over MCP."),
    },
    "Your cluster": {
        "submit": ("jobs", "Send a study to a cluster as a batch job."),
        "jobs": ("jobs", "List, follow and stop those jobs."),
    },
}


class _Commands(click.Group):
    """Turns our errors into messages and exit codes; shows a traceback only with --debug."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section, commands in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(name, text) for name, (_, text) in commands.items()], col_max=12)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for commands in SECTIONS.values() for name in commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        known = {name: module for commands in SECTIONS.values() for name, (module, _) in commands.items()}
        # What is misspelled may be any of them.
        for module in [known[cmd_name]] if cmd_name in known else set(known.values()):
            import_module(f".{module}", __package__)
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        ctx.meta[AS_JSON] = "--json" in takewhile(lambda word: word != "--", ctx.args)
        with handled_signals(), _said_once():
            return self._invoke(ctx)

    def _invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BsearchError as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            if was_stopped():
                self._stopped(ctx, error)
            if not _told_as_json(ctx, error):
                terminal(as_json=True).print(masked(str(error)))
            code = FAILED if isinstance(error, StorageError | ClusterError | OutputError) else BAD_INPUT
            ctx.exit(ctx.meta.get(FAILURE, code))
        except (KeyboardInterrupt, SystemExit) as error:
            if isinstance(error, SystemExit) and not is_termination(error):
                raise
            self._stopped(ctx, error)
        except click.ClickException as error:
            object.__setattr__(error, "message", masked(error.message))  # which repeats what was typed
            object.__setattr__(error, "exit_code", ctx.meta.get(FAILURE, error.exit_code))
            if _told_as_json(ctx, error):
                ctx.exit(error.exit_code)
            raise
        except (click.exceptions.Exit, click.Abort):
            raise
        except ReaderGoneError:
            ctx.exit(0)
        except Exception as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            if was_stopped():
                self._stopped(ctx, error)
            if not _told_as_json(ctx, error, f"internal error: {type(error).__name__}: {error}"):
                say(
                    f"internal error: {type(error).__name__}: {error}\n"
                    "This is a bug in bsearch: please report it, with what `bsearch --debug ...` prints.",
                    err=True,
                )
            ctx.exit(ctx.meta.get(FAILURE, FAILED))

    def _stopped(self, ctx: click.Context, error: BaseException) -> NoReturn:
        terminated = is_termination(error)
        if not _told_as_json(ctx, KeyboardInterrupt(), "terminated" if terminated else "interrupted"):
            say("terminated" if terminated else "interrupted", err=True)
        ctx.exit(TERMINATED if terminated else INTERRUPTED)


def _told_as_json(ctx: click.Context, error: BaseException, message: str = "") -> bool:
    """With --json, the error as the last line of stderr; whether it was."""
    if ctx.meta.get(AS_JSON):
        from ..search.report.stdio.answer import error_answer

        give(error_answer(error, message), sys.stderr)
    return bool(ctx.meta.get(AS_JSON))


@contextmanager
def _said_once() -> Iterator[None]:
    """Print what was left out of a database, each sentence once; rows are read again and again."""
    said, show = set[str](), warnings.showwarning

    def show_once(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if not issubclass(category, LeftOutWarning):
            show(message, category, *where, **more)
        elif (text := str(message)) not in said:
            said.add(text)
            say(text, err=True)

    with warnings.catch_warnings():
        warnings.simplefilter("always", LeftOutWarning)
        warnings.showwarning = show_once
        yield


@click.group("bsearch", cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="bsearch")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def main(debug: bool) -> None:
    """Find the best batch size, learning rate and accumulation: the front of training speed against accuracy.

    Start with `bsearch init`, then `bsearch check study.yaml` and `bsearch run study.yaml`.
    """


def epilog(example: str) -> str:
    return f"\b\nExample:\n  {example}"


def results_beside(study: str) -> Path:
    """The results folder of a study file; for a database URL, the one in this folder."""
    return (Path() if is_url(study) else Path(study).parent) / "results"


def documents_only(as_json: bool) -> AbstractContextManager[Any]:
    """With --json, output of the task goes to stderr: stdout is for the document."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


@contextmanager
def located_faults(file: Path | None) -> Any:
    """Add file and line to faults found after the file was read."""
    try:
        yield
    except StudyFileError as error:
        from ..spaces.study.file import located

        raise (located(error, file) if file is not None else error) from None
