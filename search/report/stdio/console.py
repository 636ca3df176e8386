"""What all commands and the Python interface print with: to people, and to programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any, TextIO

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from ....spaces.boundary.secrets import masked
from ....spaces.errors import plain
from .streams import steady


class _Terminal(Console):
    """Prints text literally: names and messages come from files, tasks and databases that others may have written."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(plain(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for part in super().render(renderable, options):
            yield part if part.control else Segment(plain(part.text), part.style)

    def print(self, *parts: Any, soft_wrap: bool | None = None, **options: Any) -> None:
        """Prose breaks between words; tables and pictures fit, and would be cut."""
        prose = self.is_terminal and all(isinstance(part, str | Text) for part in parts)
        super().print(*parts, soft_wrap=not prose if soft_wrap is None else soft_wrap, **options)


def terminal(as_json: bool = False) -> Console:
    """The console for people: stdout, or stderr where stdout is a document."""
    file = steady(sys.stderr if as_json else sys.stdout)
    console = _Terminal(file=file, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = max(console.width, 1000)  # a file or a pipe has no width to fit
    return console


def say(text: str, *, err: bool = False) -> None:
    """Print a line to people: no password leaves, and nothing that a terminal would interpret."""
    click.echo(plain(masked(text)), err=err)


def give(document: str, file: TextIO | None = None) -> None:
    """Print a document as it is, for whatever reads it; to stdout unless another stream is given."""
    click.echo(document, nl=False, file=file)


def json_text(document: Any, indent: int | None = 2) -> str:
    """A document as JSON, which has no NaN and no infinity: they become null."""
    try:
        return json.dumps(document, indent=indent, allow_nan=False, default=str) + "\n"
    except ValueError:
        return json_text(json.loads(json.dumps(document, default=str), parse_constant=lambda _: None), indent)
