"""What a study's text becomes: rows for training and validation, and an account of what was left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

from ...spaces.errors import TaskError, near_miss
from ...spaces.trial import TrialSetup
from .packing import Document, Fate, Rows, TooLong, fitted, pack
from .pretrained import chat_template_of, flag, length_of, packs, path_of, tokenizer_of, tokens_of
from .records import KINDS, records
from .text import Templates, Text, Tokens, Turns, checked_template, held_out, texts, tokenized

# Documents that `check` shows, and characters of each.
_SHOWN, _CHARACTERS = 3, 300


@dataclass(frozen=True, slots=True)
class Corpus:
    """Rows, and what became of the documents that they were made of.

    Args:
        on_both_sides: validation documents whose text is also among the training documents.
        samples: a few of the training documents as text, with what counts in the loss in guillemets.
    """

    train: Rows
    validation: Rows
    fate: Fate
    on_both_sides: int
    samples: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """What became of the training documents."""
        fate, rows = self.fate, len(self.train.tokens)
        share = fate.counted / max(fate.tokens, 1)
        parts = [f"{_counted(fate.documents, 'document')} in {_counted(rows, 'row')}; {share:.0%} of their tokens count"]
        if fate.longer:
            rest = f", of which {fate.left_out:,} left out" if fate.left_out else ""
            parts.append(f"{fate.longer:,} longer than a row{rest}")
        if fate.silent:
            what = "part of a document" if fate.longer else "document"
            many = "parts of documents" if fate.longer else "documents"
            parts.append(f"{_counted(fate.silent, what, many)} without a counted token left out")
        if self.on_both_sides:
            parts.append(f"{_counted(self.on_both_sides, 'validation document')} with the text of a training document")
        return "; ".join(parts)


def _counted(count: int, one: str, many: str = "") -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Everything that rows depend on."""

    text: str
    validation_text: str
    validation_share: float | None
    files: str
    templates: Templates
    turns: Turns
    train_on_prompt: bool
    tokenizer: str
    chat_template: str
    length: int
    too_long: TooLong
    alone: bool


def corpus_of(setup: TrialSetup) -> Corpus:
    """The rows of a study; the same for all trials with the same parameters of text.

    Raises:
        TaskError: parameters that do not fit, or a record that is not understood.
    """
    options = setup.parameters
    if "text" not in options:
        raise TaskError("space.text: expected a file or folder of text. Write text: PATH under space:.")
    share = options.get("validation_share")
    if share is not None and (isinstance(share, bool | str) or not 0 < share < 1):
        raise TaskError(f"space.validation_share: expected a number between 0 and 1, got {share!r}")
    if share is not None and "validation_text" in options:
        raise TaskError("space.validation_share: expected validation_text or a share of the text, got both")
    prompt = checked_template(str(options.get("prompt", "")), "prompt")
    completion = checked_template(str(options.get("completion", "{text}" if prompt else "")), "completion")
    return _corpus(
        _Wanted(
            text=str(path_of(setup, "text")),
            validation_text=str(path_of(setup, "validation_text")) if "validation_text" in options else "",
            validation_share=share,
            files=str(options.get("files", "")),
            templates=Templates(prompt, completion),
            turns=_one_of(setup, "turns", get_args(Turns)),
            train_on_prompt=flag(setup, "train_on_prompt"),
            tokenizer=tokenizer_of(setup),
            chat_template=chat_template_of(setup),
            length=length_of(setup),
            too_long=_one_of(setup, "too_long", get_args(TooLong)),
            alone=not packs(setup),
        )
    )


def _one_of(setup: TrialSetup, key: str, choices: Sequence[str]) -> Any:
    chosen = str(setup.parameters.get(key, choices[0]))
    if chosen not in choices:
        raise TaskError(f"space.{key}: expected {' or '.join(choices)}, got {chosen!r}.{near_miss(chosen, choices)}")
    return chosen


@lru_cache(maxsize=4)
def _corpus(wanted: _Wanted) -> Corpus:
    tokens = tokens_of(wanted.tokenizer, wanted.chat_template)

    def read(path: str, key: str, leave_out: str = "") -> list[Text]:
        placed = records(Path(path), wanted.files, key, Path(leave_out) if leave_out else None)
        found = list(texts(placed, wanted.templates, tokens, wanted.turns))
        if not found:
            kinds = wanted.files or " or ".join(f"*{kind}" for kind in KINDS)
            raise TaskError(f"space.{key}: expected text in {path}, got none. Files that count: {kinds}.")
        return found

    train = read(wanted.text, "text", wanted.validation_text)
    if wanted.validation_text:
        validation = read(wanted.validation_text, "validation_text")
    else:
        train, validation = held_out(train, wanted.validation_share)
    sides: list[tuple[list[Document], Fate]] = []
    for part, name in ((train, "training"), (validation, "validation")):
        documents = tokenized(part, tokens, train_on_prompt=wanted.train_on_prompt)
        fitting, fate = fitted(documents, wanted.length, wanted.too_long)
        if not fitting:
            key = "validation_text" if name == "validation" and wanted.validation_text else "text"
            longer = f"{fate.longer:,} are longer than {wanted.length} tokens, nothing counts in the others"
            advice = "Write a larger length" + ("." if wanted.too_long == "cut_prompt" else ", or too_long: cut_prompt.")
            raise TaskError(
                f"space.{key}: expected a token that counts in the loss in {len(part):,} {name} documents, got none: "
                + (f"{longer}. {advice}" if fate.longer else "no completion, or turn of the assistant, has one.")
            )
        sides.append((fitting, fate))
    (first, fate), (second, _) = sides
    rows = [pack(documents, wanted.length, alone=wanted.alone) for documents in (first, second)]
    shown = first[:: max(len(first) // _SHOWN, 1)][:_SHOWN]
    trained = {one.whole for one in train}
    on_both_sides = sum(one.whole in trained for one in validation)
    return Corpus(rows[0], rows[1], fate, on_both_sides, tuple(_shown(document, tokens) for document in shown))


def _shown(document: Document, tokens: Tokens) -> str:
    """A document in a line, with what counts in guillemets; its beginning and end where it is long."""
    text = "".join(_marked(document, tokens)).replace("\n", "⏎")
    half = _CHARACTERS // 2
    return text if len(text) <= _CHARACTERS else f"{text[:half]} … {text[-half:]}"


def _marked(document: Document, tokens: Tokens) -> Iterator[str]:
    counts = document.counts or [True] * len(document.tokens)
    at = 0
    for counted, run in groupby(counts):
        end = at + len(list(run))
        piece = tokens.decode(list(document.tokens[at:end]))
        yield f"«{piece}»" if counted else piece
        at = end


__all__ = ["Corpus", "corpus_of"]
