"""What the shell offers while a command is typed: study files, studies, launchers."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from ...spaces.errors import BsearchError
from ...spaces.study_file import read_study


def study_files(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Study files that begin so; the shell adds the folders."""
    folder, _, begun = incomplete.rpartition("/")
    found = [CompletionItem(incomplete, type="dir")]
    with suppress(OSError):
        for file in sorted(Path(folder or ("/" if incomplete.startswith("/") else ".")).iterdir()):
            if file.name.startswith(begun) and file.suffix in (".yaml", ".yml"):
                found.append(CompletionItem(incomplete.removesuffix(begun) + file.name))
    return found


def study_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Studies in the storage of the STUDY that was typed before; only of a file, for a server may not answer."""
    # While the option still lacks its value, Click leaves what came before it among the arguments.
    given, storage = ctx.params.get("study") or next(iter(ctx.args), None), ctx.params.get("storage")
    with suppress(BsearchError):
        url = given if given and "://" in str(given) else storage or (given and read_study(Path(given)).storage)
        if url and str(url).startswith("sqlite"):
            from ..store.records import Records

            return [
                CompletionItem(kept.name)
                for kept in Records(str(url), create=False).studies()
                if kept.name.startswith(incomplete)
            ]
    return []


def launchers(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Launchers that are installed."""
    names = {point.name for point in entry_points(group="bsearch.submitters")}
    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]
