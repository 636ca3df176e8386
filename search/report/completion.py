"""Shell completion of study files, study names and launchers."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from ...spaces.boundary.storage import is_url
from ...spaces.errors import BsearchError
from ...spaces.study.file import read_study


def study_files(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Study files that start with the typed text; the shell adds folders."""
    folder, _, prefix = incomplete.rpartition("/")
    found = [CompletionItem(incomplete, type="dir")]
    with suppress(OSError):
        for file in sorted(Path(folder or ("/" if incomplete.startswith("/") else ".")).iterdir()):
            if file.name.startswith(prefix) and file.suffix in (".yaml", ".yml"):
                found.append(CompletionItem(incomplete.removesuffix(prefix) + file.name))
    return found


def study_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Studies in the storage of the STUDY already typed; only for SQLite files, since a server may not answer."""
    # While the option has no value yet, Click leaves earlier arguments in `ctx.args`.
    given, storage = ctx.params.get("study") or next(iter(ctx.args), None), ctx.params.get("storage")
    with suppress(BsearchError):
        url = given if given and is_url(str(given)) else storage or (given and read_study(Path(given)).storage)
        if url and str(url).startswith("sqlite"):
            from ..store.tables import Tables

            return [
                CompletionItem(study.name)
                for study in Tables(str(url), create=False).studies()
                if study.name.startswith(incomplete)
            ]
    return []


def launchers(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Installed launchers."""
    names = {point.name for point in entry_points(group="bsearch.submitters")}
    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]
