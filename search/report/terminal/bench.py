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
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("size", "micro\nx acc.", "epoch", "inference", "samples/s", "peak"):
        column(table, name, "right")
    for row in document["rows"]:
        table.add_row(
            str(row["size"]),
            f"{row['micro_batch']} x {row['accumulation']}",
            _with_std(row["epoch_s"], seconds),
            _with_std(row["inference_s"], seconds),
            _with_std(row["samples_per_s"], number),
            "-" if row["peak_bytes"] is None else readable_bytes(row["peak_bytes"]),
        )
    yield table
    yield from document["left_out"]
    compared = document["differences"]
    for difference in compared:
        yield difference["sentence"]
    if compared:
        real = sum(difference["real"] for difference in compared)
        yield (
            f"Near powers of two: {real} of {len(compared)} differences are larger than the noise "
            "(95 % for all comparisons together)."
        )
    if document["limit_bytes"] is None:
        yield "No memory limit here; --set memory.limit=2GiB finds the largest micro-batch that fits it."
    elif document["largest_micro_batch"] == document["training_set"]:
        yield f"The whole training set of {document['training_set']} samples fits {readable_bytes(document['limit_bytes'])}"
    else:
        yield f"The largest micro-batch that fits {readable_bytes(document['limit_bytes'])}: {document['largest_micro_batch']}"


def _with_std(value: Mapping[str, float], readable: Any) -> str:
    middle = value["mean"]
    share = value["std"] / middle if middle else 0.0
    return f"{readable(middle)} ± {share:.1%}"
