"""Records of files, folders and data sets, each with the place that a message about it names."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...spaces.errors import TaskError

# A record, and where it is, such as `text.jsonl:12`. A `.txt` is one record, whose field `text` is all of it.
Placed = tuple[Any, str]

KINDS = (".txt", ".jsonl", ".ndjson", ".json", ".csv", ".parquet")


# A data set's name on a hub, and which split of it, such as `owner/chats#train_sft`.
_ON_A_HUB = re.compile(r"[\w.-]+/[\w.-]+(#[\w.-]+)?")


def records_on_hub(name: str, key: str) -> Iterator[Placed]:
    """The records of a data set by its name on a hub, as `datasets` loads and keeps it; of the split `train` unless named.

    Raises:
        TaskError: it is not there, or cannot be reached from here.
    """
    source, _, split = name.partition("#")
    try:
        from datasets import load_dataset
    except ImportError:
        raise TaskError(f"space.{key}: {name} is loaded by `datasets`: pip install datasets") from None
    try:
        loaded = load_dataset(source, split=split or "train")
    except Exception as error:  # of any kind: no such name, split or network
        reason = (str(error).splitlines() or [""])[0]
        raise TaskError(
            f"space.{key}: expected a file, a folder, or a data set's name on a hub that can be reached, got {name!r}: {reason}"
        ) from None
    yield from (
        (_without_nulls(record), f"{name}, row {number}") for number, record in enumerate(loaded, start=1)
    )


def is_on_hub(name: str) -> bool:
    """Whether a text that names no file may be a data set's name on a hub."""
    return _ON_A_HUB.fullmatch(name) is not None and not name.lower().endswith(KINDS)


def records(path: Path, files: str, key: str, leave_out: Sequence[Path] = ()) -> Iterator[Placed]:
    """The records of a file, of a folder's files in the order of their names, or of what `datasets` saved.

    Args:
        files: names that count in a folder, such as `*.py`; empty: by `KINDS`. Hidden files and folders never do.
        leave_out: files and folders within it that do not count, such as those for validation.
        key: of the study, for messages.

    Raises:
        TaskError: something there cannot be read as what its name says.
    """
    if not path.exists():
        raise TaskError(f"space.{key}: expected a file or folder of text, got {path}, which does not exist")
    if path.is_file():
        if path.suffix.lower() not in KINDS and not files:
            raise TaskError(
                f"space.{key}: expected a file that ends in {', '.join(KINDS)}, got {path.name}. To read it as plain text, "
                f"write files: '*{path.suffix}'."
            )
        yield from _of_file(path, key)
    elif (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        yield from _of_dataset(path, key)
    else:
        for file in sorted(path.rglob(files or "*")):
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            elsewhere = any(file.resolve().is_relative_to(other.resolve()) for other in leave_out)
            if file.is_file() and not hidden and not elsewhere and (files or file.suffix.lower() in KINDS):
                yield from _of_file(file, key)


def _of_file(path: Path, key: str) -> Iterator[Placed]:
    kind = path.suffix.lower()
    if kind == ".parquet":
        yield from _of_parquet(path, key)
        return
    try:
        text = path.read_bytes().decode("utf-8-sig")  # without a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"space.{key}: {path} cannot be read as text: {error}") from None
    if kind in (".jsonl", ".ndjson"):
        # A line ends at LF alone: other separators are legal within a JSON string.
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield _parsed(line, f"{path}:{number}", "a JSON object"), f"{path}:{number}"
    elif kind == ".json":
        whole = _parsed(text, str(path), "a JSON array of objects")
        if not isinstance(whole, list):
            raise TaskError(f"{path}: expected a JSON array of objects, got {kind_of(whole)}")
        yield from ((record, f"{path}, record {number}") for number, record in enumerate(whole, start=1))
    elif kind == ".csv":
        yield from _rows(text, path)
    else:
        yield {"text": text}, str(path)


def _rows(text: str, path: Path) -> list[Placed]:
    """The rows of a CSV file with a header, each with the number of its last line."""
    found: list[Placed] = []
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    before = csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # of the whole process
    try:
        for row in reader:
            where, fields = f"{path}:{reader.line_num}", len(reader.fieldnames or ())
            count = fields + len(row[None]) if None in row else fields - list(row.values()).count(None)
            if count != fields:
                raise TaskError(
                    f"{where}: expected {fields} fields, as in the header, got {count}. Quote those with commas."
                )
            found.append((row, where))
    except csv.Error as error:
        raise TaskError(f"{path}:{reader.line_num}: expected CSV with a header: {error}") from None
    finally:
        csv.field_size_limit(before)
    return found


def _parsed(text: str, where: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        at = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        raise TaskError(f"{where}: expected {expected}, got invalid JSON at {at}: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{where}: expected {expected}: {error}") from None


def _of_parquet(path: Path, key: str) -> Iterator[Placed]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table
    except ImportError:
        raise TaskError(f"space.{key}: {path} needs pyarrow: pip install pyarrow") from None
    try:
        table = read_table(path)
    except (ArrowException, OSError) as error:
        raise TaskError(f"space.{key}: {path} cannot be read as Parquet: {error}") from None
    yield from (
        (_without_nulls(record), f"{path}, row {number}")
        for number, record in enumerate(table.to_pylist(), start=1)
    )


def _of_dataset(path: Path, key: str) -> Iterator[Placed]:
    try:
        from datasets import Dataset, load_from_disk
    except ImportError:
        raise TaskError(
            f"space.{key}: {path} was saved by `datasets`, which is not installed: pip install datasets"
        ) from None
    try:
        saved = load_from_disk(str(path))
    except Exception as error:  # of any kind: files are missing, or of another version
        raise TaskError(f"space.{key}: {path} cannot be read by `datasets`: {error}") from None
    if not isinstance(saved, Dataset):
        raise TaskError(
            f"space.{key}: expected one split of a data set, got the folder of all ({', '.join(saved)}): {path}. Write {key}: "
            f"{path.name}/{next(iter(saved))}."
        )
    yield from (
        (_without_nulls(record), f"{path}, row {number}") for number, record in enumerate(saved, start=1)
    )


def _without_nulls(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record of Arrow, which gives objects within lists each other's keys, with null; its own fields stay."""

    def pruned(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: pruned(field) for key, field in value.items() if field is not None}
        return [pruned(item) for item in value] if isinstance(value, list) else value

    return {key: pruned(value) for key, value in record.items()}


def fields_of(record: Any, where: str) -> Mapping[str, Any]:
    """A record with fields.

    Raises:
        TaskError: it is something else.
    """
    if not isinstance(record, Mapping):
        raise TaskError(f"{where}: expected a JSON object, got {kind_of(record)}")
    return record


def kind_of(value: Any) -> str:
    """A value's type by JSON's name."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    for kind, name in ((Mapping, "an object"), (list, "a list"), (str, "text"), (int | float, "a number")):
        if isinstance(value, kind):
            return name
    return type(value).__name__


def text_of(value: Any, what: str, where: str) -> str:
    """A field as text: a string, or a number as Python prints it.

    Raises:
        TaskError: it is null, true, a list, an object, or text that cannot be encoded.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise TaskError(
                f"{where}: expected {what} to be text, got half of a surrogate pair in it"
            ) from None
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    raise TaskError(f"{where}: expected {what} to be text or a number, got {kind_of(value)}")
