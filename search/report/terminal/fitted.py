"""Tables that fit the terminal: columns without room are left out, those of least worth first, and named below."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from ....spaces.errors import plain
from ..columns import Column

# Between columns; and what a column of sentences needs, if they are longer.
_GAP, _SENTENCE = 2, 20


class Fitted:
    """A table that cuts neither a value nor a name.

    Args:
        columns: in the order in which they are shown; the first names its row.
        worth: names of those that are needed most, in that order; the others follow as they are shown.
        headed: show their names above them.
        named: say below which columns are left out; not where each row of the screen is counted.
    """

    def __init__(
        self, columns: Iterable[Column], worth: Sequence[str] = (), *, headed: bool = True, named: bool = True
    ) -> None:
        self.columns, self._headed, self._named = list(columns), headed, named
        rank = {name: place for place, name in enumerate(worth)}
        self._order = sorted(
            range(len(self.columns)), key=lambda at: (at > 0, rank.get(self.columns[at].name, len(rank)))
        )

    @classmethod
    def of_rows(
        cls,
        names: Sequence[str],
        rows: Iterable[Sequence[str]],
        worth: Sequence[str] = (),
        *,
        words: Sequence[str] = (),
        flows: Sequence[str] = (),
    ) -> Fitted:
        """The same of rows; `words` and `flows` name such columns."""
        columns = [*zip(*rows, strict=True)] or [()] * len(names)
        made = (
            Column(name, cells, name in words, name in flows)
            for name, cells in zip(names, columns, strict=True)
        )
        return cls(made, worth)

    def widths(self, width: int) -> dict[int, int]:
        """The columns that fit so many characters, by their place, and how wide they are."""
        found: dict[int, int] = {}
        left, wanted = width + _GAP, [_wanted(column, self._heading(column)) for column in self.columns]
        for at in self._order:
            least = min(wanted[at][0], width) if not found else wanted[at][0]
            if least + _GAP <= left:
                found[at], left = least, left - least - _GAP
        for at in found:  # what is left over is for sentences, which then take fewer lines
            more = min(wanted[at][1] - found[at], left)
            found[at], left = found[at] + max(more, 0), left - max(more, 0)
        return dict(sorted(found.items()))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = self.widths(options.max_width)
        shown = [self.columns[at] for at in widths]
        heads = [self._heading(column) for column in shown]
        rows = max((head.count("\n") for head in heads), default=0)
        table = Table(box=None, header_style="bold", pad_edge=False, show_header=self._headed)
        for column, head, width in zip(shown, heads, widths.values(), strict=True):
            justify: Literal["left", "right"] = "left" if column.words or column.flows else "right"
            table.add_column(
                "\n" * (rows - head.count("\n")) + head,
                width=width,
                justify=justify,
                overflow="fold",
                no_wrap=False,
            )
        for cells in zip(*(column.cells for column in shown), strict=True):
            table.add_row(*(Text(plain(cell)) for cell in cells))
        yield table
        left_out = [
            column for at, column in enumerate(self.columns) if at not in widths and any(column.cells)
        ]
        notes = [line for column in left_out if column.flows for line in self._notes(column)]
        if names := [_named(column) for column in left_out if not column.flows]:
            notes.append(f"Not shown, for lack of room: {', '.join(names)}")
        for line in notes if self._named else ():
            yield Text(line, style="dim", overflow="fold", no_wrap=False)

    @property
    def width(self) -> int:
        """Of all columns, in characters."""
        found = self.widths(sys.maxsize)
        return sum(found.values()) + _GAP * (len(found) - 1)

    @property
    def head_rows(self) -> int:
        return (
            max((self._heading(column).count("\n") + 1 for column in self.columns), default=1)
            if self._headed
            else 0
        )

    def _heading(self, column: Column) -> str:
        return _heading(column) if self._headed else ""

    def _notes(self, column: Column) -> Iterable[str]:
        """A column of sentences as lines, each with the rows that it is about."""
        first, about = self.columns[0], dict[str, list[str]]()
        for row, text in zip(first.cells, column.cells, strict=True):
            about.setdefault(text, []).append(row)
        return [f"{first.name} {', '.join(rows)}: {plain(text)}" for text, rows in about.items() if text]


def _wanted(column: Column, heading: str) -> tuple[int, int]:
    """How narrow a column can be, and how wide it is in one line."""
    lines = [*heading.split("\n"), *(column.cells if not column.flows else ())]
    least = max(map(cell_len, lines), default=0)
    if not column.flows:
        return least, least
    whole = max(map(cell_len, column.cells), default=0)
    word = max((cell_len(word) for cell in column.cells for word in cell.split()), default=0)
    return max(least, word, min(whole, _SENTENCE)), max(least, whole)


def _heading(column: Column) -> str:
    """A name as a heading: a long one in several lines, none wider than it must be.

    >>> _heading(Column("effective_batch", ("64",)))
    'effective\\nbatch'
    """
    if len(column.name) <= 8 or "\n" in column.name:
        return column.name
    parts = column.name.split("_")
    width = max(*map(len, parts), *map(cell_len, column.cells if not column.flows else ()), 8)
    lines = [parts[0]]
    for part in parts[1:]:
        joined = f"{lines[-1]}_{part}"
        lines[-1:] = [joined] if len(joined) <= width else [lines[-1], part]
    return "\n".join(lines)


def _named(column: Column) -> str:
    """A column in a sentence, with its value where that is the same in every row."""
    name, values = column.name.replace("\n", " ") or "notes", set(column.cells)
    return f"{name} ({values.pop()} in all)" if len(values) == 1 else name
