"""docs/benchmarks.md and its plots, from the rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from searchers import NOT_INSTALLABLE, WAYS
from table import CLOCKS, FAMILIES, PARAMETERS, Row, cells, decisions, family_of, table, title

DOCS = Path(__file__).parents[2] / "docs"
TITLES = {
    "lcbench@52": "LCBench at its full length",
    "lcbench": "LCBench: networks on tabular data",
    "digits": "digits",
    "cifar": "CIFAR-10",
    "zeus": "Zeus: the batch size alone",
}
PROBLEMS = {
    "lcbench@52": "Batch, learning rate, weight decay and dropout of trainings of 52 epochs, with three layers, 256 units "
    "and a momentum of .9, by the same surrogate: the best lies in a corner of a linear weight decay.",
    "lcbench": "Epochs, batch, learning rate, momentum, weight decay, layers, units and dropout, by "
    "[YAHPO's surrogate](https://arxiv.org/abs/2109.03670) of [LCBench](https://arxiv.org/abs/2006.13799).",
    "digits": "Trainings of a small network on scikit-learn's digits, measured: batch, learning rate and epochs. "
    "A setting is looked up at its nearest neighbour.",
    "cifar": "Trainings of a small network on 4,000 images, measured likewise: batch, learning rate, epochs and width.",
    "zeus": "Workloads that [Zeus](https://github.com/ml-energy/zeus) measured on a V100, 5 to 15 batch sizes each. "
    "Without epochs, known seconds cannot be offered to peers here.",
}
AXES = {"trials": "trials", "seconds": "time, in mean trials on four workers"}
# One colour for each searcher; dashed with seconds known.
COLORS = {
    **{"random": "#888888", "tpe": "#1f77b4", "gp": "#17becf", "botorch": "#9467bd"},
    **{"moasha": "#bcbd22", "primo": "#8c564b", "ours": "#d62728"},
}


def write_page(rows: Sequence[Row], docs: Path = DOCS) -> None:
    (docs / "benchmarks.md").write_text(page(rows))
    for clock in CLOCKS:
        save_plot(rows, clock, docs / "images" / f"benchmarks-{clock}.svg")


def page(rows: Sequence[Row]) -> str:
    """The page's Markdown."""
    families = [family for family in FAMILIES if any(family_of(row) == family for row in rows)]
    versions = sorted({row.version for row in rows})
    missing = [f"{title(way)} could not be installed: {reason}." for way, reason in NOT_INSTALLABLE.items()]
    return (
        "\n\n".join(
            [
                HEAD,
                *(section(rows, family) for family in families),
                *missing,
                f"Versions: {', '.join(versions)}.",
            ]
        )
        + "\n"
    )


def section(rows: Sequence[Row], family: str) -> str:
    """A family's heading, description and table."""
    problems = len({row.problem for row in rows if family_of(row) == family})
    size = f"{counted(problems, 'problem')}, {counted(PARAMETERS[family], 'parameter')}"
    parts = [marked(lines) for lines in (decisions(rows, family), table(rows, family)) if len(lines) > 1]
    anchor = family.replace("@", "-")
    return "\n\n".join([f"## {TITLES[family]} ({size}) {{#{anchor}}}", PROBLEMS[family], *parts])


def marked(lines: Sequence[Sequence[str]]) -> str:
    header, *others = lines
    return "\n".join(
        "| " + " | ".join(words) + " |" for words in (header, ["---", *["--:"] * (len(header) - 1)], *others)
    )


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def save_plot(rows: Sequence[Row], clock: str, file: Path) -> None:
    """Mean shares against trainings, a panel for each family; the same rows give the same bytes."""
    families = [family for family in FAMILIES if any(family_of(row) == family for row in rows)]
    with mpl.rc_context({"svg.hashsalt": "bsearch", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(3.2 * len(families), 3.6), layout="constrained")
        panels = figure.subplots(1, len(families), squeeze=False)[0]
        for family, axes in zip(families, panels, strict=True):
            draw(axes, [row for row in rows if family_of(row) == family and row.clock == clock])
            axes.set_title(f"{TITLES[family].partition(':')[0]}, {counted(PARAMETERS[family], 'parameter')}")
            axes.set_xlabel(AXES[clock])
        panels[0].set_ylabel("share of the true front's hypervolume")
        handles = {line.get_label(): line for axes in panels for line in axes.get_lines()}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(file, metadata={"Date": None, "Creator": None})


def draw(axes: mpl.axes.Axes, rows: Sequence[Row]) -> None:
    """Lines of the ways that were run on every problem, as far as no search was cut short."""
    after, problems = sorted({row.after for row in rows}), len({row.problem for row in rows})
    found = {count: cells(rows, rows[0].clock, count) for count in after}
    for way in WAYS:
        cells_by_count = {count: found[count][way] for count in after if way in found[count]}
        counts = [
            count for count, cell in cells_by_count.items() if cell.problems == problems and not cell.cut
        ]
        name, _, known = way.partition("+")
        if counts:
            axes.plot(
                counts,
                [cells_by_count[count].mean for count in counts],
                "--" if known else "-",
                color=COLORS[name],
                linewidth=2 if name == "ours" else 1.2,
                label=title(way),
            )
    axes.grid(alpha=0.3)


HEAD = """\
# Benchmark

What do a few trials find, by bsearch and by other searchers, on problems that cost nothing to run? Each section begins with
what people decide by, the fastest setting within so much of the best; then come shares of the true front. Every figure on this
page is computed from the rows in `benchmarks/public/results/`, and one command makes them again:

```sh
make benchmark-public    # python benchmarks/public/run.py; it resumes. --ways ours --again: bsearch's rows anew
```

- **2, 5, 10 %**: of the searches, in percent, that have any setting within that part of the true front's range of the best
  accuracy, after so many trials one after another. *Fastest*: the seconds of the fastest one within 5 % over those of the true
  one, geometric mean over the searches that have one. *Top fifth*: the share of the hypervolume above the best less a fifth of
  that range. Searchers without these columns were run before they were kept.
- **Share**: of the hypervolume of log seconds and accuracy under the true front, reached by the trainings that ended.
  The standard error is over problems and seeds, with each problem's mean over the searchers subtracted. *Rank*: the mean over
  problems, 1 is best, after the larger number of trials.
- **Trials**: one after another; a training that was stopped counts by the share that it trained. bsearch stops none here.
- **Time**: four simulated workers, for the mean time of so many random trials. What has not ended by then does not
  count. bsearch stops trials and prefers fast ones here, as in a study with `budget.hours`.
- **Seconds known**: bsearch is given the seconds of every setting beforehand, as in a study. A peer searches the seconds of a
  training in place of its epochs, and gets the epochs whose training takes nearest to them.
- **Peers** have their defaults, but: all are told log seconds scaled to 0 to 1 over the problem's range, which they could not
  know, and 1 - accuracy. BoTorch is given the reference point, begins with five Sobol points as Ax does, and optimizes from 4
  starts and 256 samples, so that it ends in time. MOASHA's ranks are repaired. PriMO has no priors; where it would fail
  because all trials of a rung still run, it proposes without them.
- **bsearch** ranks settings by what people choose ([decision 0077](decisions/0077-what-people-choose.md)), which costs some of
  the whole hypervolume.
- **Seeds** differ, because asks of Gaussian processes take long. `*`: the wall-clock limit cut some of these searches short:
  a lower bound, and no rank. Where nothing stands, nothing was run. Milliseconds are the median of the last asks, on shared
  cores.

![Share of the true front against trials, for each searcher](images/benchmarks-trials.svg)

![Share of the true front against time, for each searcher](images/benchmarks-seconds.svg)"""
