"""A language model's own rows of tokens as data sets that other libraries train on, in the trial's order."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...search.report.frameworks.settings import ChosenSettings
from ...spaces.errors import OutputError, TaskError

# Label of a token that the loss leaves out, in `transformers`.
_IGNORED = -100
# A data set's records, of rows in this order.
Records = Callable[[Any, np.ndarray], Iterator[dict[str, Any]]]


def whole_rows(rows: Any, order: np.ndarray) -> Iterator[dict[str, Any]]:
    """A record for each row. Positions begin anew with each document, by which `transformers` keeps them apart.

    Args:
        rows: tokens, labels and segments, (rows, length) each, as `packing.Rows` has them.
    """
    from ...objectives.language.packing import positions

    return _records(rows, order, position_ids=positions(rows.segments).numpy())


def padded_rows(rows: Any, order: np.ndarray) -> Iterator[dict[str, Any]]:
    """A record for each row, which is one document, with an attention mask of 0 over what fills it: not all models that train
    on such rows take positions.
    """
    return _records(rows, order, attention_mask=(rows.segments.numpy() == 0).astype(np.int32))


def numbered_rows(rows: Any, order: np.ndarray) -> Iterator[dict[str, Any]]:
    """A record for each row, whose attention mask numbers its documents from 1, by which LLaMA-Factory keeps them apart."""
    return _records(rows, order, attention_mask=rows.segments.numpy() + 1)


def _records(rows: Any, order: np.ndarray, **column: np.ndarray) -> Iterator[dict[str, Any]]:
    columns = {"input_ids": rows.tokens.numpy(), "labels": _labels(rows), **column}
    return ({name: values[row] for name, values in columns.items()} for row in order)


def documents(rows: Any, order: np.ndarray) -> Iterator[dict[str, Any]]:
    """A record for each document, row after row; what fills a row is a part of its last, so that packing in this order makes
    the same rows.
    """
    tokens, labels, segments = rows.tokens.numpy(), _labels(rows), rows.segments.numpy()
    for row in order:
        begins = [at for at in np.flatnonzero(np.diff(segments[row], prepend=-1)) if at < rows.lengths[row]]
        for start, end in zip(begins, [*begins[1:], segments.shape[1]], strict=True):
            yield _document(tokens[row, start:end], labels[row, start:end])


def lone_documents(rows: Any, order: np.ndarray) -> Iterator[dict[str, Any]]:
    """A record for each row, which is one document, without what fills it."""
    tokens, labels = rows.tokens.numpy(), _labels(rows)
    for row in order:
        yield _document(tokens[row, : rows.lengths[row]], labels[row, : rows.lengths[row]])


def _document(tokens: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    return {"input_ids": tokens, "labels": labels, "attention_mask": np.ones_like(tokens)}


def _labels(rows: Any) -> np.ndarray:
    """At each token its own id, if it counts: `transformers` compares it with what precedes it."""
    labels = np.full(rows.labels.shape, _IGNORED, np.int32)
    labels[:, 1:] = rows.labels.numpy()[:, :-1]
    return labels


def write_rows(chosen: ChosenSettings, records: Records, folder: Path) -> None:
    """Write the rows of a trial's whole training, in its order, and those for validation, as `datasets` reads them.

    Raises:
        TaskError: the study's text or tokenizer cannot be read.
        OutputError: the folder cannot be written, or holds something else.
    """
    try:
        from datasets import Dataset, DatasetDict, disable_progress_bars
    except ImportError:
        raise TaskError("rows of tokens are written by `datasets`: pip install datasets") from None
    from ...objectives.data.batches import SampleStream
    from ...objectives.language.corpus import corpus_of

    disable_progress_bars()
    setup = chosen.setup
    corpus = corpus_of(setup)
    if folder.exists():
        raise OutputError(
            f"{folder}: expected to write the trial's rows here, got a folder of this name. Move it away."
        )
    weights = None if corpus.weights is None else np.asarray(corpus.weights)
    order = SampleStream(len(corpus.train.tokens), setup.seed, weights).take(0, setup.samples_budget).index
    parts = {
        "train": (corpus.train, order),
        "validation": (corpus.validation, np.arange(len(corpus.validation.tokens))),
    }
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as beside:
            cache, made = str(Path(beside) / "cache"), Path(beside) / "rows"
            DatasetDict(
                {
                    # The fingerprint only names a file of the cache, and is made of all rows unless it is given.
                    name: Dataset.from_generator(
                        partial(records, rows, of), cache_dir=cache, fingerprint=name
                    )
                    for name, (rows, of) in parts.items()
                }
            ).save_to_disk(str(made))
            made.rename(folder)
    except OSError as error:
        raise OutputError(f"{folder}: the trial's rows cannot be written: {error}") from None
