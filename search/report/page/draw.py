"""Draws figures with Plotly: for the page as JSON, and as objects of its own, with the same colour and marker per tone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .figure import Axis, Figure, Layer, Tone

if TYPE_CHECKING:
    from plotly import graph_objects


@dataclass(frozen=True, slots=True)
class _Style:
    """Colours in light and dark mode, marker, size in points, and opacity."""

    light: str
    dark: str
    marker: str = "circle"
    size: float = 7.0
    opacity: float = 1.0


# Tones differ in shape as well as in colour, for print and for colour-blind readers.
LOOKS: dict[Tone, _Style] = {
    "front": _Style("#0b5cad", "#6cb6ff", size=9),
    "baseline": _Style("#b45309", "#ffb454", "star", 15),
    "other": _Style("#6b7280", "#9aa4b2", opacity=0.45),
    "stopped": _Style("#7c5cbf", "#b79cff", "triangle-down", opacity=0.6),
    "paused": _Style("#7c5cbf", "#b79cff", "triangle-down-open", opacity=0.6),
    "diverged": _Style("#b3261e", "#ff8a80", "x"),
    "infeasible": _Style("#8a6d00", "#e3c04b", "square-open"),
    "failed": _Style("#b3261e", "#ff8a80", "cross"),
    "law": _Style("#0b5cad", "#6cb6ff", size=6),
    "measured": _Style("#0f766e", "#4fd1c5", "x-thin-open", 7),
    "limit": _Style("#b3261e", "#ff8a80", "diamond", 8),
    "alternative": _Style("#7c5cbf", "#b79cff", "diamond-open", 8),
}
_DASHED = ("limit", "alternative")


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
    axes = {
        "xaxis": _plotly_axis(figure.x, figure.log_ticks("x")),
        "yaxis": _plotly_axis(figure.y, figure.log_ticks("y")),
    }
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
        trace |= {
            "text": [_escaped(label).replace("\n", "<br>") for label in layer.labels],
            "hoverinfo": "text",
        }
    else:
        trace |= {"hoverinfo": "x+y+name" if layer.kind != "steps" else "skip"}
    if layer.trials:
        trace["customdata"] = list(layer.trials)
    curve = figure.name == "learning-curves"
    if layer.kind == "points":
        trace |= {
            "mode": "markers",
            "marker": {"symbol": style.marker, "size": style.size, "opacity": style.opacity},
        }
        if layer.values:
            trace["marker"] |= {
                "color": list(layer.values),
                "title": _escaped(figure.value_name),
                "opacity": 0.9,
            }
        if layer.low:
            above = [high - y for high, y in zip(layer.high, layer.y, strict=True)]
            below = [y - low for low, y in zip(layer.low, layer.y, strict=True)]
            trace["error_y"] = {
                "type": "data",
                "symmetric": False,
                "array": above,
                "arrayminus": below,
                "thickness": 1,
            }
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
        trace |= {
            "mode": "lines",
            "line": {"width": 1.2 if curve else 2, "dash": dash},
            "opacity": style.opacity,
        }
        if layer.kind == "steps":
            trace["line"]["shape"] = "hv"
        trace["showlegend"] = not curve
    return trace


def _plotly_axis(axis: Axis, log_ticks: list[float]) -> dict[str, Any]:
    document: dict[str, Any] = {
        "title": {"text": _escaped(axis.title)},
        "type": "log" if axis.log else "linear",
    }
    if axis.log:
        document |= {"tickvals": log_ticks, "ticktext": [f"{tick:g}" for tick in log_ticks]}
    if axis.ends:
        document["range"] = [math.log10(end) if axis.log else end for end in axis.ends]
    return document


def _escaped(text: str) -> str:
    """Text escaped for Plotly, which interprets a few HTML tags in any text."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
