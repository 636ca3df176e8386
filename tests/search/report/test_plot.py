"""Points as text: each is drawn, in its place, and nothing is wider than it may be."""

from __future__ import annotations

import math
from itertools import product

from bsearch.search.report.terminal.plot import scatter
from hypothesis import given
from hypothesis import strategies as st

numbers = st.floats(1e-3, 1e6)
groups = st.fixed_dictionaries(
    {marker: st.lists(st.tuples(numbers, st.floats(-1e4, 1e4)), max_size=8) for marker in ".o*"}
).filter(lambda found: any(found.values()))


@given(groups, st.integers(10, 200), st.integers(5, 30))
def test_every_point_is_in_its_place(
    drawn: dict[str, list[tuple[float, float]]], width: int, height: int
) -> None:
    lines = scatter(drawn, width=width, height=height, x_label="seconds", y_label="loss").splitlines()
    assert len(lines) == max(height, 6)
    assert max(map(len, lines)) <= max(min(width, 100), 40)
    begin = lines[0].index("┌") + 1
    columns, rows = lines[0].count("─"), len(lines) - 4
    canvas = [line[begin : begin + columns].ljust(columns) for line in lines[1 : 1 + rows]]
    points = [point for group in drawn.values() for point in group]
    xs, ys = [math.log(x) for x, _ in points], [y for _, y in points]
    # The slow twin: for each point the cells whose middles are nearest, of which rounding may choose any.
    may_be: list[tuple[str, set[tuple[int, int]]]] = []
    for marker, group in drawn.items():
        for x, y in group:
            places = []
            for value, ends, cells in ((math.log(x), xs, columns), (y, ys, rows)):
                low, high = min(ends), max(ends)
                middles = [low + (high - low) * cell / (cells - 1) for cell in range(cells)]
                far = [abs(middle - value) for middle in middles]
                near = min(far) + 1e-9 * max(abs(low), abs(high))
                places.append([cell for cell in range(cells) if far[cell] <= near] if high > low else [0])
            may_be.append((marker, set(product(*places))))
    found = {
        (column, rows - 1 - row): letter
        for row, line in enumerate(canvas)
        for column, letter in enumerate(line)
        if letter != " "
    }
    assert all(
        any(marker == letter and cell in cells for marker, cells in may_be) for cell, letter in found.items()
    )
    assert all(cells & set(found) for _, cells in may_be)
    order = list(drawn)
    for cell, letter in found.items():  # the last group's marker is on top
        certain = [marker for marker, cells in may_be if cells == {cell}]
        assert all(order.index(marker) <= order.index(letter) for marker in certain)


@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=9))
def test_ticks_stand_under_their_place_and_apart(points: list[tuple[float, float]]) -> None:
    lines = scatter({"o": points}, width=80, height=12, x_label="x", y_label="y").splitlines()
    axis, below = lines[-3], lines[-2].ljust(len(lines[-3]))
    assert axis.count("┬") == len(below.split())
    for place, letter in enumerate(axis):
        if letter == "┬":
            assert below[max(place - 6, 0) : place + 7].strip()
