"""What a study's text becomes: rows for training and validation, and an account of what was left out."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

from ...spaces.errors import TaskError, near_miss
from ...spaces.trial import TrialSetup
from .packing import Document, Fate, Rows, TooLong, fitted, joined, pack
from .pretrained import chat_template_of, flag, length_of, packs, tokenizer_of, tokens_of
from .records import KINDS, is_on_hub, records, records_on_hub
from .text import Templates, Text, Tokens, Turns, checked_template, held_out, texts, tokenized

# Documents that `check` shows, and characters of each.
_SHOWN, _CHARACTERS = 3, 300


@dataclass(frozen=True, slots=True)
class Corpus:
    """Rows, and what became of the documents that they were made of.

    Args:
        on_both_sides: validation documents whose text is also among the training documents.
        weights: of the training rows, where they are drawn by the weights of their sources; None: each once an epoch.
        shares: of the rows that are drawn, by source.
        teaches_ends: whether a document counts the token that ends it, or an answer, so that the model learns where to stop.
        samples: a few of the training documents as text, with what counts in the loss in guillemets.
    """

    train: Rows
    validation: Rows
    fate: Fate
    on_both_sides: int
    weights: tuple[float, ...] | None
    shares: tuple[tuple[str, float], ...]
    teaches_ends: bool
    samples: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """What became of the training documents."""
        fate, rows = self.fate, len(self.train.tokens)
        share = fate.counted / max(fate.tokens, 1)
        parts = [
            f"{_counted(fate.documents, 'document')} in {_counted(rows, 'row')}; {share:.0%} of their tokens count"
        ]
        if fate.longer:
            rest = f", of which {fate.left_out:,} left out" if fate.left_out else ""
            parts.append(f"{fate.longer:,} longer than a row{rest}")
        if fate.silent:
            what = "part of a document" if fate.longer else "document"
            many = "parts of documents" if fate.longer else "documents"
            parts.append(f"{_counted(fate.silent, what, many)} without a counted token left out")
        if self.on_both_sides:
            parts.append(
                f"{_counted(self.on_both_sides, 'validation document')} with the text of a training document"
            )
        if self.weights is not None:
            drawn = ", ".join(f"{share:.0%} from {name}" for name, share in self.shares)
            parts.append(f"rows are drawn by weight, with replacement: {drawn}")
        if not self.teaches_ends:
            parts.append("no document trains on an end token, so the model does not learn where to stop")
        return "; ".join(parts)


def _counted(count: int, noun: str, many: str = "") -> str:
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


@dataclass(frozen=True, slots=True)
class _Source:
    """A file, a folder, or a data set's name on a hub; and its weight among others, if it has one."""

    name: str
    weight: float | None = None


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Everything that rows depend on."""

    text: tuple[_Source, ...]
    validation_text: tuple[_Source, ...]
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
            text=_sources(setup, "text"),
            validation_text=_sources(setup, "validation_text") if "validation_text" in options else (),
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
        raise TaskError(
            f"space.{key}: expected {' or '.join(choices)}, got {chosen!r}.{near_miss(chosen, choices)}"
        )
    return chosen


def _sources(setup: TrialSetup, key: str) -> tuple[_Source, ...]:
    """What a parameter names: one source, or several separated by commas, each with `@` and a weight or none of them.

    Raises:
        TaskError: some have weights and some do not, or one is no positive number.
    """
    whole = str(setup.parameters[key])
    names = (
        [whole] if setup.path(whole).exists() else [name.strip() for name in whole.split(",") if name.strip()]
    )
    found = []
    for name in names:
        plain, at, weight = name.rpartition("@")
        if not at or setup.path(name).exists():
            plain, weight = name, ""
        path = setup.path(plain)
        found.append(
            _Source(str(path) if path.exists() or not is_on_hub(plain) else plain, _weight(weight, key))
        )
    if len({source.weight is None for source in found}) > 1:
        raise TaskError(
            f"space.{key}: expected a weight for all sources or none, such as a.jsonl@3, b.jsonl@1; got {whole!r}"
        )
    if key != "text" and any(source.weight is not None for source in found):
        raise TaskError(
            f"space.{key}: expected sources without weights, since every document is scored once; got {whole!r}"
        )
    return tuple(found)


def _weight(text: str, key: str) -> float | None:
    if not text:
        return None
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not 0 < weight < math.inf:
        raise TaskError(f"space.{key}: expected a weight > 0 after @, got {text!r}")
    return weight


@lru_cache(maxsize=4)
def _corpus(wanted: _Wanted) -> Corpus:
    tokens = tokens_of(wanted.tokenizer, wanted.chat_template)
    train = [_read(wanted, source, "text", tokens) for source in wanted.text]
    validation = [_read(wanted, source, "validation_text", tokens) for source in wanted.validation_text]
    if not validation:
        train, validation = map(
            list, zip(*(held_out(part, wanted.validation_share) for part in train), strict=True)
        )
    fitting, fates = zip(*(_fitted(wanted, part, "text", tokens) for part in train), strict=True)
    scored, _ = _fitted(wanted, [text for part in validation for text in part], "validation_text", tokens)
    parts = [pack(documents, wanted.length, alone=wanted.alone) for documents in fitting]
    documents = [document for part in fitting for document in part]
    shown = documents[:: max(len(documents) // _SHOWN, 1)][:_SHOWN]
    trained = {text.whole for part in train for text in part}
    return Corpus(
        train=joined(parts),
        validation=pack(scored, wanted.length, alone=wanted.alone),
        fate=reduce(operator.add, fates),
        on_both_sides=sum(text.whole in trained for part in validation for text in part),
        weights=None
        if wanted.text[0].weight is None
        else tuple(
            float(source.weight or 0) / len(rows.tokens)
            for source, rows in zip(wanted.text, parts, strict=True)
            for _ in rows.lengths
        ),
        shares=tuple(
            (Path(source.name).name, (source.weight or 0) / sum(other.weight or 0 for other in wanted.text))
            for source in wanted.text
            if source.weight is not None
        ),
        teaches_ends=_teaches_ends(documents, tokens),
        samples=tuple(_shown(document, tokens) for document in shown),
    )


def _read(wanted: _Wanted, source: _Source, key: str, tokens: Tokens) -> list[Text]:
    """The texts of a source; without files that are for validation.

    Raises:
        TaskError: there are none, or one is not understood.
    """
    path = Path(source.name)
    elsewhere = [Path(other.name) for other in wanted.validation_text] if key == "text" else []
    placed = (
        records_on_hub(source.name, key)
        if is_on_hub(source.name)
        else records(path, wanted.files, key, elsewhere)
    )
    found = list(texts(placed, wanted.templates, tokens, wanted.turns))
    if not found:
        kinds = wanted.files or " or ".join(f"*{kind}" for kind in KINDS)
        raise TaskError(f"space.{key}: expected text in {source.name}, got none. Files that count: {kinds}.")
    return found


def _fitted(wanted: _Wanted, made: list[Text], key: str, tokens: Tokens) -> tuple[list[Document], Fate]:
    """The documents of texts that fit into rows, or are made to.

    Raises:
        TaskError: there are none.
    """
    fitting, fate = fitted(
        tokenized(made, tokens, train_on_prompt=wanted.train_on_prompt), wanted.length, wanted.too_long
    )
    if fitting:
        return fitting, fate
    name = "validation" if key == "validation_text" else "training"
    key = "text" if not wanted.validation_text else key
    longer = f"{fate.longer:,} are longer than {wanted.length} tokens, nothing counts in the others"
    advice = "Write a larger length" + (
        "." if wanted.too_long == "cut_prompt" else ", or too_long: cut_prompt."
    )
    raise TaskError(
        f"space.{key}: expected a token that counts in the loss in {len(made):,} {name} documents, got none: "
        + (f"{longer}. {advice}" if fate.longer else "no completion, or turn of the assistant, has one.")
    )


def _teaches_ends(documents: Sequence[Document], tokens: Any) -> bool:
    """Whether any document counts a special token after its first."""
    special = {
        *getattr(tokens, "all_special_ids", ()),
        *getattr(tokens, "added_tokens_decoder", ()),
        tokens.eos_token_id,
    }
    return any(
        counted and token in special
        for document in documents
        for token, counted in zip(
            document.tokens[1:], (document.counts or [True] * len(document.tokens))[1:], strict=True
        )
    )


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
