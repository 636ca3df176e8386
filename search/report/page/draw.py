"""Figures drawn: as Plotly's JSON for a page, as PNG or SVG by Matplotlib. Both give each tone the same colour and marker."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from .figures import Axis, Figure, Layer, Tone

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from plotly import graph_objects


@dataclass(frozen=True, slots=True)
class _Look:
    """Colour in light and dark, Plotly's and Matplotlib's marker, size in points, and how dense it is."""

    light: str
    dark: str
    plotly: str = "circle"
    matplotlib: str = "o"
    size: float = 7.0
    opacity: float = 1.0


# Told apart by shape as well as by colour: people print, and see colours differently.
LOOKS: dict[Tone, _Look] = {
    "front": _Look("#0b5cad", "#6cb6ff", size=9),
    "knee": _Look("#b3261e", "#ff8a80", "circle-open", "o", 18),
    "baseline": _Look("#b45309", "#ffb454", "star", "*", 15),
    "other": _Look("#6b7280", "#9aa4b2", opacity=0.45),
    "stopped": _Look("#7c5cbf", "#b79cff", "triangle-down", "v", opacity=0.6),
    "diverged": _Look("#b3261e", "#ff8a80", "x", "x"),
    "infeasible": _Look("#8a6d00", "#e3c04b", "square-open", "s"),
    "failed": _Look("#b3261e", "#ff8a80", "cross", "P"),
    "law": _Look("#0b5cad", "#6cb6ff", size=6),
    "measured": _Look("#0f766e", "#4fd1c5", "x-thin-open", "x", 7),
    "limit": _Look("#b3261e", "#ff8a80", "diamond", "D", 8),
    "alternative": _Look("#7c5cbf", "#b79cff", "diamond-open", "d", 8),
}
_DASHED = ("limit", "alternative")


def plotly_document(figure: Figure) -> dict[str, Any]:
    """A figure for Plotly: traces and axes, with colours left as tones, which the page fills in for its theme."""
    return {
        "name": figure.name,
        "title": figure.title,
        "traces": [_trace(figure, layer) for layer in figure.layers],
        "x": _plotly_axis(figure.x, figure.log_ticks("x")),
        "y": _plotly_axis(figure.y, figure.log_ticks("y")),
    }


def plotly_figure(figure: Figure) -> graph_objects.Figure:
    """A figure as Plotly's own object, in colours for a light background."""
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
    look = LOOKS[layer.tone]
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
        trace |= {"mode": "markers", "marker": {"symbol": look.plotly, "size": look.size, "opacity": look.opacity}}
        if layer.values:
            trace["marker"] |= {"color": list(layer.values), "title": figure.value_name, "opacity": 0.9}
        if layer.low:
            above = [high - y for high, y in zip(layer.high, layer.y, strict=True)]
            below = [y - low for low, y in zip(layer.low, layer.y, strict=True)]
            trace["error_y"] = {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1}
    elif layer.kind == "bars":
        trace |= {
            "type": "bar",
            "orientation": "h",
            "base": list(layer.low),
            "x": [high - low for low, high in zip(layer.low, layer.high, strict=True)],
            "width": [0.8] * len(layer.x),
            "textposition": "none",
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
        trace |= {"mode": "lines", "line": {"width": 1.2 if curve else 2, "dash": dash}, "opacity": look.opacity}
        if layer.kind == "steps":
            trace["line"]["shape"] = "hv"
        trace["showlegend"] = not curve
    return trace


def _plotly_axis(axis: Axis, log_ticks: list[float]) -> dict[str, Any]:
    made: dict[str, Any] = {"title": {"text": _escaped(axis.title)}, "type": "log" if axis.log else "linear"}
    if axis.log:
        made |= {"tickvals": log_ticks, "ticktext": [f"{tick:g}" for tick in log_ticks]}
    if axis.ticks:
        made |= {"tickvals": [place for place, _ in axis.ticks], "ticktext": [_escaped(words) for _, words in axis.ticks]}
    return made


def _escaped(text: str) -> str:
    """Words as Plotly shows them: it reads a few HTML tags in any text."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def picture(figure: Figure, kind: Literal["png", "svg"]) -> bytes:
    """A figure as PNG or SVG, on white, as papers and slides want it."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    # The same study gives the same bytes: no date, no random names in the SVG.
    with mpl.rc_context({"svg.hashsalt": figure.name, "text.usetex": False, "text.parse_math": False}):
        canvas = Canvas(figsize=(8, 5), dpi=120, layout="constrained")
        axes = canvas.subplots()
        for layer in figure.layers:
            if layer.shown:
                _draw(axes, layer, figure)
        sides: tuple[tuple[Axis, Literal["x", "y"]], ...] = ((figure.x, "x"), (figure.y, "y"))
        for axis, name in sides:
            getattr(axes, f"set_{name}scale")("log" if axis.log else "linear")
            getattr(axes, f"set_{name}label")(axis.title)
            ticks = axis.ticks
            if axis.log:
                getattr(axes, f"{name}axis").minorticks_off()
                ticks = tuple((tick, f"{tick:g}") for tick in figure.log_ticks(name))
            if ticks:
                getattr(axes, f"set_{name}ticks")([place for place, _ in ticks], [words for _, words in ticks])
        axes.set_title(figure.title)
        axes.grid(alpha=0.25)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize=8)
        written = io.BytesIO()
        canvas.savefig(written, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return written.getvalue()


def _draw(axes: Axes, layer: Layer, figure: Figure) -> None:
    look, curve = LOOKS[layer.tone], figure.name == "learning-curves"
    style = "--" if layer.tone in _DASHED else "-"
    if layer.kind == "points":
        if layer.values:
            drawn = axes.scatter(layer.x, layer.y, c=layer.values, cmap="viridis", s=36, label=layer.name)
            axes.figure.colorbar(drawn, ax=axes, label=figure.value_name)
            return
        if layer.low:
            below = [max(y - low, 0.0) for low, y in zip(layer.low, layer.y, strict=True)]
            above = [max(high - y, 0.0) for high, y in zip(layer.high, layer.y, strict=True)]
            axes.errorbar(layer.x, layer.y, yerr=[below, above], fmt="none", ecolor=look.light, elinewidth=1, capsize=4)
        hollow = "open" in look.plotly and look.matplotlib not in "x+"
        colour: dict[str, Any] = {"facecolors": "none", "edgecolors": look.light} if hollow else {"color": look.light}
        style_of: dict[str, Any] = {
            "s": look.size**2 * 0.5,
            "marker": look.matplotlib,
            "alpha": look.opacity,
            "label": layer.name + " (numbers: effective batch)" * bool(layer.batches),
        }
        axes.scatter(layer.x, layer.y, **style_of, **colour)
        for x, y, batch in zip(layer.x, layer.y, layer.batches, strict=False):
            axes.annotate(batch, (x, y), textcoords="offset points", xytext=(5, -11), fontsize=8)
    elif layer.kind == "bars":
        wide = [high - low for low, high in zip(layer.low, layer.high, strict=True)]
        axes.barh(layer.y, wide, left=layer.low, height=0.8, color=look.light, edgecolor="white", label=layer.name)
    elif layer.kind == "band":
        axes.fill_between(layer.x, layer.low, layer.high, color=look.light, alpha=0.15, lw=0, label=layer.name)
    elif layer.kind == "steps":
        axes.step(layer.x, layer.y, where="post", color=look.light, ls=style, label=layer.name)
    else:
        label = None if curve else layer.name
        axes.plot(layer.x, layer.y, color=look.light, ls=style, alpha=look.opacity, lw=1.2 if curve else 1.8, label=label)
