"""Records of files, folders and data sets, each with the place that a message about it names."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...spaces.errors import TaskError

# A record, and where it is, such as `text.jsonl:12`. Of a `.txt` the record is its text.
Placed = tuple[Any, str]

KINDS = (".txt", ".jsonl", ".ndjson", ".json", ".csv", ".parquet")


def records(path: Path, files: str, key: str) -> Iterator[Placed]:
    """The records of a file, of a folder's files in the order of their names, or of what `datasets` saved.

    Args:
        files: names that count in a folder, such as `*.py`; empty: by `KINDS`.
        key: of the study, for messages.

    Raises:
        TaskError: something there cannot be read as what its name says.
    """
    if not path.exists():
        raise TaskError(f"space.{key}: expected a file or folder of text, got {path}, which does not exist")
    if path.is_file():
        yield from _of_file(path, key)
    elif (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        yield from _of_dataset(path, key)
    else:
        for one in sorted(path.rglob(files or "*")):
            if one.is_file() and (files or one.suffix in KINDS):
                yield from _of_file(one, key)


def _of_file(path: Path, key: str) -> Iterator[Placed]:
    if path.suffix == ".parquet":
        yield from _of_parquet(path, key)
        return
    try:
        text = path.read_bytes().decode("utf-8-sig")  # without a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"space.{key}: {path} cannot be read as text: {error}") from None
    if path.suffix in (".jsonl", ".ndjson"):
        # A line ends at LF alone: other separators are legal within a JSON string.
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield _parsed(line, f"{path}:{number}", "a JSON object on each line"), f"{path}:{number}"
    elif path.suffix == ".json":
        whole = _parsed(text, str(path), "a JSON array of objects")
        if not isinstance(whole, list):
            raise TaskError(f"{path}: expected a JSON array of objects, got {_kind(whole)}")
        yield from ((record, f"{path}, record {number}") for number, record in enumerate(whole))
    elif path.suffix == ".csv":
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        try:
            for row in reader:
                where = f"{path}:{reader.line_num}"
                if None in row or None in row.values():
                    raise TaskError(
                        f"{where}: expected {len(reader.fieldnames or ())} fields, as in the header, got another number"
                    )
                yield row, where
        except csv.Error as error:
            raise TaskError(f"{path}:{reader.line_num}: expected CSV with a header: {error}") from None
    else:
        yield text, str(path)


def _parsed(text: str, where: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{where}: expected {expected}: {error}") from None


def _of_parquet(path: Path, key: str) -> Iterator[Placed]:
    try:
        from pyarrow import ArrowException  # type: ignore[import-untyped]
        from pyarrow.parquet import read_table  # type: ignore[import-untyped]
    except ImportError:
        raise TaskError(f"space.{key}: {path} needs pyarrow: pip install 'bsearch[language]'") from None
    try:
        table = read_table(path)
    except (ArrowException, OSError) as error:
        raise TaskError(f"space.{key}: {path} cannot be read as Parquet: {error}") from None
    yield from ((record, f"{path}, row {number}") for number, record in enumerate(table.to_pylist()))


def _of_dataset(path: Path, key: str) -> Iterator[Placed]:
    try:
        from datasets import Dataset, load_from_disk
    except ImportError:
        raise TaskError(
            f"space.{key}: {path} was saved by `datasets`, which is not installed: pip install 'bsearch[language]'"
        ) from None
    saved = load_from_disk(str(path))
    if not isinstance(saved, Dataset):
        raise TaskError(f"space.{key}: expected one of the parts of {path}: {', '.join(saved)}. Write text: {path.name}/train.")
    yield from ((record, f"{path}, row {number}") for number, record in enumerate(saved))


def fields_of(record: Any, where: str) -> Mapping[str, Any]:
    """A record with fields.

    Raises:
        TaskError: it is something else.
    """
    if not isinstance(record, Mapping):
        raise TaskError(f"{where}: expected a JSON object, got {_kind(record)}")
    return record


def _kind(value: Any) -> str:
    """A value's type by JSON's name."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    for kind, name in ((Mapping, "an object"), (list, "a list"), (str, "text"), (int | float, "a number")):
        if isinstance(value, kind):
            return name
    return type(value).__name__


def text_of(value: Any, what: str, where: str) -> str:
    """A field as text: a string, or a number as it is written.

    Raises:
        TaskError: it is null, true, a list, an object, or text that cannot be encoded.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise TaskError(f"{where}: expected {what} to be text, got half of a surrogate pair in it") from None
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise TaskError(f"{where}: expected {what} to be text or a number, got {_kind(value)}")


__all__ = ["KINDS", "Placed", "fields_of", "records", "text_of"]
