"""The command that serves programs."""

from __future__ import annotations

from pathlib import Path

import click

from ..spaces.errors import StudyFileError
from .group import epilog, main


@main.command(
    "mcp", epilog=epilog("bsearch mcp experiments\n  claude mcp add bsearch -- bsearch mcp experiments")
)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path), default=".")
def mcp(folder: Path) -> None:
    """Serve the studies in FOLDER to agents: an MCP server over stdin and stdout.

    Its tools are check, run, status, stop, front, explain, ask, compare and export. Nothing outside FOLDER is read or run,
    except by the code of a study's task. docs/agents.md has recipes.
    """
    try:
        from ..extras.agents.server import serve
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("mcp"):
            raise
        raise StudyFileError("the MCP SDK is not installed. Install it: pip install mcp") from None
    serve(folder)
