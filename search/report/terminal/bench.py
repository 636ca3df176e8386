"""`bsearch profile --batches`: do batch sizes have to be powers of two, on this model and this device?

Sizes are timed in rounds, in random order within each, so that two sizes compare as pairs under the same load. A difference
counts as real only if its interval, corrected for the number of comparisons, excludes zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from ....spaces.readable import number, readable_bytes, seconds
from .tables import column


def bench_tables(document: Mapping[str, Any]) -> Iterator[Table | str]:
    """The text and tables of `bsearch profile --batches`."""
    devices = document["devices"]
    yield (
        f"{document['task']} on {devices} x {document['device']}, {document['precision']}; mean ± standard deviation over "
        f"{document['rounds']} rounds"
    )
    published = any(row["published_minutes"] for row in document["rows"])
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("size", "micro\nx acc.", "epoch", "inference", "samples/s", "peak", *(["published"] if published else []), ""):
        column(table, name, "right")
    for row in document["rows"]:
        reference = row["published_minutes"]
        table.add_row(
            str(row["size"]),
            f"{row['micro_batch']} x {row['accumulation']}",
            _with_std(row["epoch_s"], seconds),
            _with_std(row["inference_s"], seconds),
            _with_std(row["samples_per_s"], number),
            "-" if row["peak_bytes"] is None else readable_bytes(row["peak_bytes"]),
            *([f"{reference:.2f} min" if reference else ""] if published else []),
            "rule" if row["suggested"] else "",
        )
    yield table
    yield from document["left_out"]
    if published:
        where = "a V100" if devices == 1 else f"{devices} V100s"
        yield (
            f"published: minutes of 10 epochs of MobileNetV3-large on CIFAR-10 at 224 pixels on {where} in mixed precision, "
            "one run each (Raschka 2022)"
        )
    compared = document["differences"]
    for difference in compared:
        yield difference["sentence"]
    if compared:
        real = sum(difference["real"] for difference in compared)
        yield (
            f"Near powers of two: {real} of {len(compared)} differences are larger than the noise "
            "(95 % for all comparisons together)."
        )
    yield from _rule_sentences(document["rule"])
    if document["limit_bytes"] is None:
        yield "No memory limit here; --set memory.limit=2GiB finds the largest micro-batch that fits it."
    elif document["largest_micro_batch"] == document["training_set"]:
        yield f"The whole training set of {document['training_set']} samples fits {readable_bytes(document['limit_bytes'])}"
    else:
        yield f"The largest micro-batch that fits {readable_bytes(document['limit_bytes'])}: {document['largest_micro_batch']}"


def _rule_sentences(rule: Mapping[str, Any]) -> Iterator[str]:
    if rule["image"] is None:
        yield "The rule int(n x 2^14 x SM / (H x W x C)) is for images, which these inputs are not."
        return
    channels, height, width = rule["image"]
    sizes = ", ".join(map(str, rule["suggested"])) or "none in this range"
    yield (
        f"The rule int(n x 2^14 x SM / (H x W x C)) with SM = {rule['multiprocessors']} and {height} x {width} x {channels} "
        f"suggests, among others: {sizes}"
    )
    if not rule["differences"]:
        return
    held = [difference for difference in rule["differences"] if difference["real"] and difference["change"] < 0]
    for difference in rule["differences"]:
        yield f"  {difference['sentence']}"
    verdict = (
        "it holds here" if len(held) == len(rule["differences"]) else "no sign that it holds here" if not held else "mixed"
    )
    yield f"  its sizes are faster than their neighbours in {len(held)} of {len(rule['differences'])} comparisons: {verdict}"


def _with_std(value: Mapping[str, float], readable: Any) -> str:
    middle = value["mean"]
    share = value["std"] / middle if middle else 0.0
    return f"{readable(middle)} ± {share:.1%}"
