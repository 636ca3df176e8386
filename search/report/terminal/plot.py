"""Points as lines of text, without colour: what `run` and `show` draw."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

_WIDEST, _NARROWEST = 100, 40
# Labels of the vertical axis, at most.
_LEVELS = 7


def scatter(
    groups: Mapping[str, Sequence[tuple[float, float]]],
    *,
    width: int,
    height: int,
    x_label: str,
    y_label: str,
) -> str:
    """Points (x, y) by their marker, x on a logarithmic scale; of several in a place the last group's is seen.

    Args:
        width, height: of all of it, in characters; within what is readable.

    >>> print(scatter({"o": [(1, 0.5), (10, 2.0)]}, width=40, height=8, x_label="s", y_label="loss"))
       ┌───────────────────────────────────┐
      2┤                                  o│
    1.5┤                                   │
      1┤                                   │
    0.5┤o                                  │
       └┬───────┬────────┬────────┬───────┬┘
        1      1.8      3.2      5.6     10
    loss               s
    """
    points = [point for group in groups.values() for point in group]
    left, right = (math.log(end(x for x, _ in points)) for end in (min, max))
    low, high = (end(y for _, y in points) for end in (min, max))
    whole = max(min(width, _WIDEST), _NARROWEST)
    names = _axis_names(x_label, y_label, whole)
    rows = max(height - 3 - len(names), 2)
    levels = min(_LEVELS, rows) if high > low else 1
    at = [round(part * (rows - 1) / max(levels - 1, 1)) for part in range(levels)]
    labels = dict(zip(at, _distinct([low + (high - low) * row / (rows - 1) for row in at]), strict=True))
    margin = max(map(len, labels.values()))
    columns = whole - margin - 2

    def column(x: float) -> int:
        return _place(math.log(x), left, right, columns)

    canvas = [[" "] * columns for _ in range(rows)]
    for marker, group in groups.items():
        for x, y in group:
            canvas[_place(y, low, high, rows)][column(x)] = marker
    spots = [math.exp(left + (right - left) * part / 4) for part in range(5)]
    ticks = {column(spot): text for spot, text in zip(spots, _distinct(spots), strict=True)}
    axis, below = _x_axis(ticks, margin + 1, columns)
    lines = [f"{' ' * margin}┌{'─' * columns}┐"]
    for row in reversed(range(rows)):
        label = labels.get(row)
        lines.append(f"{(label or '').rjust(margin)}{'│' if label is None else '┤'}{''.join(canvas[row])}│")
    lines += [f"{' ' * margin}└{axis}┘", below]
    return "\n".join(line.rstrip() for line in (*lines, *names))


def _axis_names(x_label: str, y_label: str, width: int) -> list[str]:
    """The axes' names below the plot, that of x in the middle if there is room; where one line is too short, two."""
    if 2 * len(y_label) + len(x_label) + 4 <= width:
        return [y_label + x_label.center(width - 2 * len(y_label))]
    if len(y_label) + len(x_label) + 2 <= width:
        return [f"{y_label}  {x_label}"]
    return [y_label, x_label]


def _x_axis(ticks: Mapping[int, str], margin: int, columns: int) -> tuple[str, str]:
    """The axis with its ticks, and the labels below, by their columns; those without room are left out."""
    axis, below = ["─"] * columns, [" "] * (columns + margin + 1)
    for place, text in sorted(ticks.items()):
        start = min(max(margin + place - len(text) // 2, 0), len(below) - len(text))
        room = below[max(start - 1, 0) : start + len(text) + 1]
        if all(letter == " " for letter in room):
            below[start : start + len(text)] = text
            axis[place] = "┬"
    return "".join(axis), "".join(below)


def _place(value: float, low: float, high: float, cells: int) -> int:
    """The cell, of `cells` from `low` to `high`, whose middle is nearest."""
    return 0 if high <= low else min(max(round((value - low) / (high - low) * (cells - 1)), 0), cells - 1)


def _distinct(values: Sequence[float]) -> list[str]:
    """Numbers with as many digits as tell them apart."""
    for digits in range(2, 8):
        texts = [
            f"{value:.0f}" if 100 <= abs(value) < 1e6 and digits == 2 else f"{value:.{digits}g}"
            for value in values
        ]
        if len(set(texts)) == len(set(values)):
            break
    return texts
