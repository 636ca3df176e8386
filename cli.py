"""The command line: `main` with all its commands, which are in `commands/`."""

from .commands import agents, ask, check, compare, jobs, measure, results, run  # noqa: F401  # importing them adds their commands
from .commands.group import main

__all__ = ["main"]
