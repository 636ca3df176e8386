"""Shell completion of study files."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import click
from click.shell_completion import CompletionItem


def study_files(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Study files that start with the typed text; the shell adds folders."""
    folder, _, prefix = incomplete.rpartition("/")
    found = [CompletionItem(incomplete, type="dir")]
    with suppress(OSError):
        for file in sorted(Path(folder or ("/" if incomplete.startswith("/") else ".")).iterdir()):
            if file.name.startswith(prefix) and file.suffix in (".yaml", ".yml"):
                found.append(CompletionItem(incomplete.removesuffix(prefix) + file.name))
    return found
