"""Draws figures: as Plotly JSON for the page, as PNG or SVG with Matplotlib, with the same colour and marker per tone."""

from __future__ import annotations

import io
import math
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ....spaces.errors import plain
from .figure import Axis, Figure, Layer, Tone

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from plotly import graph_objects


@dataclass(frozen=True, slots=True)
class _Style:
    """Colours in light and dark mode, Plotly's and Matplotlib's markers, size in points, and opacity."""

    light: str
    dark: str
    plotly: str = "circle"
    matplotlib: str = "o"
    size: float = 7.0
    opacity: float = 1.0


# Tones differ in shape as well as in colour, for print and for colour-blind readers.
LOOKS: dict[Tone, _Style] = {
    "front": _Style("#0b5cad", "#6cb6ff", size=9),
    "knee": _Style("#b3261e", "#ff8a80", "circle-open", "o", 18),
    "baseline": _Style("#b45309", "#ffb454", "star", "*", 15),
    "other": _Style("#6b7280", "#9aa4b2", opacity=0.45),
    "stopped": _Style("#7c5cbf", "#b79cff", "triangle-down", "v", opacity=0.6),
    "paused": _Style("#7c5cbf", "#b79cff", "triangle-down-open", "v", opacity=0.6),
    "diverged": _Style("#b3261e", "#ff8a80", "x", "x"),
    "infeasible": _Style("#8a6d00", "#e3c04b", "square-open", "s"),
    "failed": _Style("#b3261e", "#ff8a80", "cross", "P"),
    "law": _Style("#0b5cad", "#6cb6ff", size=6),
    "measured": _Style("#0f766e", "#4fd1c5", "x-thin-open", "x", 7),
    "limit": _Style("#b3261e", "#ff8a80", "diamond", "D", 8),
    "alternative": _Style("#7c5cbf", "#b79cff", "diamond-open", "d", 8),
}
_DASHED = ("limit", "alternative")
# Matplotlib's axes end before numbers do: a perplexity that overflowed has no place on them.
_LARGEST = 1e100


def plotly_document(figure: Figure) -> dict[str, Any]:
    """A figure for Plotly: traces and axes. Colours are given as tones, which the page resolves for its theme."""
    return {
        "name": figure.name,
        "title": figure.title,
        "traces": [_trace(figure, layer) for layer in figure.layers],
        "x": _plotly_axis(figure.x, figure.log_ticks("x")),
        "y": _plotly_axis(figure.y, figure.log_ticks("y")),
    }


def plotly_figure(figure: Figure) -> graph_objects.Figure:
    """A figure as a Plotly object, in colours for a light background."""
    from plotly import graph_objects

    traces = []
    for layer in figure.layers:
        trace = _trace(figure, layer)
        colour = LOOKS[trace.pop("tone")].light
        for part in ("marker", "line"):
            if part in trace and "color" not in trace[part]:
                trace[part] = {**trace[part], "color": colour}
        trace.get("marker", {}).pop("title", None)
        traces.append(trace)
    axes = {"xaxis": _plotly_axis(figure.x, figure.log_ticks("x")), "yaxis": _plotly_axis(figure.y, figure.log_ticks("y"))}
    layout = {"title": {"text": figure.title}, "template": "plotly_white", "hovermode": "closest", **axes}
    return graph_objects.Figure(data=traces, layout=layout)


def _trace(figure: Figure, layer: Layer) -> dict[str, Any]:
    style = LOOKS[layer.tone]
    trace: dict[str, Any] = {
        "type": "scatter",
        "name": _escaped(layer.name),
        "tone": layer.tone,
        "x": list(layer.x),
        "y": list(layer.y),
        "visible": True if layer.shown else "legendonly",
    }
    if layer.labels:
        trace |= {"text": [_escaped(label).replace("\n", "<br>") for label in layer.labels], "hoverinfo": "text"}
    else:
        trace |= {"hoverinfo": "x+y+name" if layer.kind != "steps" else "skip"}
    if layer.trials:
        trace["customdata"] = list(layer.trials)
    curve = figure.name == "learning-curves"
    if layer.kind == "points":
        trace |= {"mode": "markers", "marker": {"symbol": style.plotly, "size": style.size, "opacity": style.opacity}}
        if layer.values:
            trace["marker"] |= {"color": list(layer.values), "title": _escaped(figure.value_name), "opacity": 0.9}
        if layer.low:
            above = [high - y for high, y in zip(layer.high, layer.y, strict=True)]
            below = [y - low for low, y in zip(layer.low, layer.y, strict=True)]
            trace["error_y"] = {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1}
    elif layer.kind == "band":
        trace |= {
            "mode": "lines",
            "x": [*layer.x, *reversed(layer.x)],
            "y": [*layer.high, *reversed(layer.low)],
            "fill": "toself",
            "line": {"width": 0},
            "hoverinfo": "skip",
        }
    else:
        dash = "dash" if layer.tone in _DASHED else "solid"
        trace |= {"mode": "lines", "line": {"width": 1.2 if curve else 2, "dash": dash}, "opacity": style.opacity}
        if layer.kind == "steps":
            trace["line"]["shape"] = "hv"
        trace["showlegend"] = not curve
    return trace


def _plotly_axis(axis: Axis, log_ticks: list[float]) -> dict[str, Any]:
    document: dict[str, Any] = {"title": {"text": _escaped(axis.title)}, "type": "log" if axis.log else "linear"}
    if axis.log:
        document |= {"tickvals": log_ticks, "ticktext": [f"{tick:g}" for tick in log_ticks]}
    if axis.ends:
        document["range"] = [math.log10(end) if axis.log else end for end in axis.ends]
    return document


def _escaped(text: str) -> str:
    """Text escaped for Plotly, which interprets a few HTML tags in any text."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def picture(figure: Figure, kind: Literal["png", "svg"]) -> bytes:
    """A figure as PNG or SVG on a white background, for papers and slides."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    # The same study gives the same bytes: no date and no random identifiers in the SVG.
    with mpl.rc_context({"svg.hashsalt": figure.name, "text.usetex": False, "text.parse_math": False}):
        canvas = Canvas(figsize=(8, 5), dpi=120, layout="constrained")
        axes = canvas.subplots()
        for layer in figure.layers:
            if layer.shown:
                _draw(axes, layer, figure)
        sides: tuple[tuple[Axis, Literal["x", "y"]], ...] = ((figure.x, "x"), (figure.y, "y"))
        for axis, name in sides:
            getattr(axes, f"set_{name}scale")("log" if axis.log else "linear")
            getattr(axes, f"set_{name}label")(plain(axis.title))
            if axis.log:
                getattr(axes, f"{name}axis").minorticks_off()
                ticks = figure.log_ticks(name)
                getattr(axes, f"set_{name}ticks")(ticks, [f"{tick:g}" for tick in ticks])
            if axis.ends:
                getattr(axes, f"set_{name}lim")(*axis.ends)
        axes.set_title(plain(figure.title))
        axes.grid(alpha=0.25)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize=8)
        buffer = io.BytesIO()
        with warnings.catch_warnings():
            # On a busy machine the search for the legend's best place takes a second, of which matplotlib warns.
            warnings.filterwarnings("ignore", message="Creating legend with loc", category=UserWarning)
            # A box stands for a character that its font lacks.
            warnings.filterwarnings("ignore", message=r"Glyph \d+", category=UserWarning)
            canvas.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()


def _draw(axes: Axes, layer: Layer, figure: Figure) -> None:
    style, curve = LOOKS[layer.tone], figure.name == "learning-curves"
    layer = replace(layer, name=plain(layer.name), y=tuple(y if abs(y) < _LARGEST else math.nan for y in layer.y))
    dash = "--" if layer.tone in _DASHED else "-"
    if layer.kind == "points":
        if layer.values:
            points = axes.scatter(layer.x, layer.y, c=layer.values, cmap="viridis", s=36, label=layer.name)
            axes.figure.colorbar(points, ax=axes, label=plain(figure.value_name))
            return
        if layer.low:
            below = [max(y - low, 0.0) for low, y in zip(layer.low, layer.y, strict=True)]
            above = [max(high - y, 0.0) for high, y in zip(layer.high, layer.y, strict=True)]
            axes.errorbar(layer.x, layer.y, yerr=[below, above], fmt="none", ecolor=style.light, elinewidth=1, capsize=4)
        hollow = "open" in style.plotly and style.matplotlib not in "x+"
        colour: dict[str, Any] = {"facecolors": "none", "edgecolors": style.light} if hollow else {"color": style.light}
        options: dict[str, Any] = {
            "s": style.size**2 * 0.5,
            "marker": style.matplotlib,
            "alpha": style.opacity,
            "label": layer.name + " (labels: effective batch)" * bool(layer.batches),
        }
        axes.scatter(layer.x, layer.y, **options, **colour)
        for x, y, batch in zip(layer.x, layer.y, layer.batches, strict=False):
            axes.annotate(batch, (x, y), textcoords="offset points", xytext=(5, -11), fontsize=8)
    elif layer.kind == "band":
        axes.fill_between(layer.x, layer.low, layer.high, color=style.light, alpha=0.15, lw=0, label=layer.name)
    elif layer.kind == "steps":
        axes.step(layer.x, layer.y, where="post", color=style.light, ls=dash, label=layer.name)
    else:
        label = None if curve else layer.name
        axes.plot(layer.x, layer.y, color=style.light, ls=dash, alpha=style.opacity, lw=1.2 if curve else 1.8, label=label)
