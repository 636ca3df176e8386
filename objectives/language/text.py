"""Documents from files, as tokens."""

from __future__ import annotations

import json
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ...spaces.errors import TaskError
from .packing import Document

# Every so many documents, one is for validation where no other text is.
_HELD_OUT = 10
_KINDS = (".txt", ".jsonl")


class Tokens(Protocol):
    """What turns text into token ids, as tokenizers of `transformers` do."""

    bos_token_id: int | None
    eos_token_id: int | None

    def __call__(self, text: Sequence[str], *, add_special_tokens: bool) -> Mapping[str, Any]: ...


class Bytes:
    """A token is a byte; 256 ends a document.

    >>> Bytes()(["hé"], add_special_tokens=False)["input_ids"]
    [[104, 195, 169]]
    """

    bos_token_id: int | None = None
    eos_token_id: int | None = 256

    def __call__(self, text: Sequence[str], *, add_special_tokens: bool) -> Mapping[str, Any]:
        return {"input_ids": [list(one.encode()) for one in text]}

    def __len__(self) -> int:
        return 257


@dataclass(frozen=True, slots=True)
class Templates:
    """How a record becomes a prompt and what follows it."""

    prompt: str = ""
    completion: str = "{text}"


@dataclass(frozen=True, slots=True)
class Text:
    """A document before it is tokenized."""

    prompt: str
    completion: str


def read_documents(path: Path, templates: Templates, files: str, key: str) -> list[Text]:
    """Documents of a file or a folder, in the order of their names.

    Args:
        key: of the study, for messages.

    Raises:
        TaskError: there is nothing there, or a record lacks a field of the templates.
    """
    if not path.exists():
        raise TaskError(f"space.{key}: expected a file or folder of text, got {path}, which does not exist")
    found = [one for one in _documents(path, templates, files, key) if one.prompt.strip() or one.completion.strip()]
    if not found:
        wanted = files or " or ".join(f"*{kind}" for kind in _KINDS)
        raise TaskError(f"space.{key}: expected text in {path}, got none. Files that count: {wanted}.")
    return found


def _documents(path: Path, templates: Templates, files: str, key: str) -> Iterator[Text]:
    if path.is_file():
        yield from _of_file(path, templates, key)
    elif (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        yield from _of_dataset(path, templates, key)
    else:
        for one in sorted(path.rglob(files or "*")):
            if one.is_file() and (files or one.suffix in _KINDS):
                yield from _of_file(one, templates, key)


def _of_file(path: Path, templates: Templates, key: str) -> Iterator[Text]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"space.{key}: {path} cannot be read as text: {error}") from None
    if path.suffix != ".jsonl":
        yield Text("", text)
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                record = json.loads(line)
            except ValueError as error:
                raise TaskError(f"{path}:{number}: expected a JSON object on each line: {error}") from None
            yield _filled(templates, record, f"{path}:{number}")


def _of_dataset(path: Path, templates: Templates, key: str) -> Iterator[Text]:
    try:
        from datasets import Dataset, load_from_disk
    except ImportError:
        raise TaskError(
            f"space.{key}: {path} was saved by `datasets`, which is not installed: pip install 'bsearch[language]'"
        ) from None
    saved = load_from_disk(str(path))
    if not isinstance(saved, Dataset):
        raise TaskError(f"space.{key}: expected one of the parts of {path}: {', '.join(saved)}. Write text: {path.name}/train.")
    for number, record in enumerate(saved):
        yield _filled(templates, record, f"{path}, row {number}")


def _filled(templates: Templates, record: Any, where: str) -> Text:
    if not isinstance(record, Mapping):
        raise TaskError(f"{where}: expected a JSON object, got {type(record).__name__}")
    for template in (templates.prompt, templates.completion):
        for name in _fields(template):
            if name not in record:
                raise TaskError(f"{where}: expected the field {name!r} of the template {template!r}, got {', '.join(record)}")
    return Text(templates.prompt.format_map(record), templates.completion.format_map(record))


def _fields(template: str) -> Iterator[str]:
    try:
        yield from (name.split(".")[0].split("[")[0] for _, name, _, _ in string.Formatter().parse(template) if name)
    except ValueError as error:
        raise TaskError(f"template {template!r}: {error}") from None


def held_out(documents: Sequence[Text]) -> tuple[list[Text], list[Text]]:
    """Documents for training, and every tenth for validation.

    Raises:
        TaskError: there are too few.
    """
    if len(documents) < _HELD_OUT:
        raise TaskError(
            f"space.text: expected at least {_HELD_OUT} documents, every tenth for validation, got {len(documents)}. Name "
            "validation_text, or give each document a file or a line of .jsonl."
        )
    rest = [one for number, one in enumerate(documents) if number % _HELD_OUT != _HELD_OUT - 1]
    return rest, list(documents[_HELD_OUT - 1 :: _HELD_OUT])


def tokenized(documents: Iterable[Text], tokens: Tokens, *, train_on_prompt: bool) -> Iterator[Document]:
    """Each document's tokens, between those that begin and end a document where the tokenizer has them."""
    documents = list(documents)
    prompts, completions = (
        tokens([getattr(one, part) for one in documents], add_special_tokens=False)["input_ids"]
        for part in ("prompt", "completion")
    )
    begins = [] if tokens.bos_token_id in (None, tokens.eos_token_id) else [tokens.bos_token_id]
    ends = [] if tokens.eos_token_id is None else [tokens.eos_token_id]
    for prompt, completion in zip(prompts, completions, strict=True):
        head = [*begins, *prompt]
        yield Document([*head, *completion, *ends], 0 if train_on_prompt or not prompt else len(head))
