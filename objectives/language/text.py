"""Records as text, of which some counts in the loss; and text as tokens."""

from __future__ import annotations

import hashlib
import json
import string
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, Protocol

from ...spaces.errors import TaskError
from .packing import Document
from .records import Placed, fields_of, kind_of, text_of

# Every tenth document is for validation by default.
_HELD_OUT = 10
# Records that are not understood, of which a message lists at most this many.
_LISTED = 5
# Names of roles, in ShareGPT's records among others.
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "function": "tool"}
# A content that no template has.
_ELSE = "\x00content\x00"
# Fields that change what is to be learnt, and that are not read.
_UNREAD = ("history", "label", "rejected", "rejected_response")
_KNOWN = ("system", "developer", "user", "assistant", "tool")

Turns = Literal["all", "last"]


class Tokens(Protocol):
    """What turns text into token ids, as tokenizers of `transformers` do."""

    bos_token_id: int | None
    eos_token_id: int | None

    def __call__(self, text: Sequence[str], *, add_special_tokens: bool) -> Mapping[str, Any]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Bytes:
    """A token is a byte; 256 ends a document.

    >>> Bytes()(["hé"], add_special_tokens=False)["input_ids"]
    [[104, 195, 169]]
    """

    bos_token_id: int | None = None
    eos_token_id: int | None = 256

    def __call__(self, text: Sequence[str], *, add_special_tokens: bool) -> Mapping[str, Any]:
        return {"input_ids": [list(piece.encode()) for piece in text]}

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace") + "<end>" * (256 in ids)

    def __len__(self) -> int:
        return 257

    def of_transformers(self) -> Any:
        """The same as a tokenizer of `transformers`, to be saved beside a model."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        # The characters that stand for bytes in byte-level vocabularies, in the order of the bytes.
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = iter(range(256, 512))
        vocabulary = {chr(byte if byte in plain else next(others)): byte for byte in range(256)}
        made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens([AddedToken("<end>", special=True)])
        return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")  # noqa: S106


@dataclass(frozen=True, slots=True)
class Templates:
    """How a record becomes a prompt and what follows it; both empty: by the fields that it has."""

    prompt: str = ""
    completion: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """A document before it is tokenized.

    Args:
        parts: pieces of text, and whether their tokens count.
        is_chat: a chat template made it, and what begins and ends it too.
        head: characters that open it, up to the end of the system's message.
    """

    parts: tuple[tuple[str, bool], ...]
    is_chat: bool = False
    head: int = 0

    @property
    def whole(self) -> str:
        return "".join(part for part, _ in self.parts)


def texts(placed: Iterable[Placed], templates: Templates, tokens: Tokens, turns: Turns) -> Iterator[Text]:
    """Each record as text, those without any left out.

    Raises:
        TaskError: records that are not understood, by their places; once all have been read.
    """
    faults: list[str] = []
    for record, where in placed:
        try:
            made = _of_record(fields_of(record, where), templates, tokens, turns, where)
        except TaskError as error:
            faults.append(str(error))
            continue
        if made.whole.strip():
            yield made
    if faults:
        more = f"\n... and {len(faults) - _LISTED:,} more" if len(faults) > _LISTED else ""
        raise TaskError("\n".join(faults[:_LISTED]) + more)


def fields_read(record: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """The fields that make a record's text where the study has no templates.

    Raises:
        TaskError: it has none that are known, or several.
    """
    kinds = [
        kind
        for kind in (("messages",), ("conversations",), ("prompt", "completion"), ("text",))
        if all(name in record for name in kind)
    ]
    if len(kinds) == 1:
        return kinds[0]
    found = " and ".join(" with ".join(kind) for kind in kinds) or ", ".join(record) or "none"
    raise TaskError(
        f"{where}: expected one of the fields text, messages, conversations, or prompt with completion; got {found}. Write "
        "templates, such as prompt: '{question}' and completion: '{answer}'."
    )


def _of_record(
    record: Mapping[str, Any], templates: Templates, tokens: Tokens, turns: Turns, where: str
) -> Text:
    if templates.prompt or templates.completion:
        filled = (_filled(template, record, where) for template in (templates.prompt, templates.completion))
        return Text(tuple(zip(filled, (False, True), strict=True)))
    kind = fields_read(record, where)
    if kind != ("text",) and (found := [name for name in _UNREAD if record.get(name) is not None]):
        raise TaskError(
            f"{where}: expected no field {', '.join(found)} beside {' with '.join(kind)}, since it would be ignored. Make it a "
            "message, leave out what is not to be learnt, or remove the field."
        )
    match kind:
        case ("text",):
            return Text(((text_of(record["text"], "the field 'text'", where), True),))
        case ("prompt", "completion") if isinstance(record["prompt"], str):
            if record.get("system") is not None:
                raise TaskError(
                    f"{where}: expected no field 'system' beside a prompt that is text. Make it a part of that."
                )
            prompt, completion = (
                text_of(record[name], f"the field {name!r}", where) for name in ("prompt", "completion")
            )
            return Text(((prompt, False), (completion, True)))
        case ("prompt", "completion"):
            earlier = _with_system(record, _messages(record["prompt"], "prompt", where), where)
            messages = [*earlier, *_messages(record["completion"], "completion", where)]
            return _chat(messages, record, tokens, turns, where, begins=len(earlier))
        case (name,):
            messages = _with_system(record, _messages(record[name], name, where), where)
            return _chat(messages, record, tokens, turns, where)
    raise AssertionError(kind)


# ---------------------------------------------------------------- templates


class _Fields(string.Formatter):
    """Fills templates with a record's fields, and with items within them: `{answers[0]}`, `{meta[title]}`."""

    def __init__(self, where: str) -> None:
        self._where = where

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        name, *keys = field_name.replace("]", "").replace(".", "[").split("[")
        if name not in kwargs:
            raise TaskError(
                f"{self._where}: expected the field {name!r} of the template, got {', '.join(kwargs)}"
            )
        value = kwargs[name]
        for key in keys:
            try:
                value = value[int(key) if isinstance(value, list) else key]
            except (KeyError, IndexError, ValueError, TypeError):
                raise TaskError(
                    f"{self._where}: expected {{{field_name}}} of the template, but there is no {key!r}"
                ) from None
        text = text_of(value, f"the field {field_name!r}", self._where)
        return (text if isinstance(value, str) else value), name  # a number may have a format


def checked_template(template: str, key: str) -> str:
    """A template.

    Raises:
        TaskError: it is none, or names no field where it should.
    """
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise TaskError(
            f"space.{key}: expected a template with fields in braces, got {template!r}: {error}"
        ) from None
    if any(not name or name.isdecimal() for name in names):
        raise TaskError(f"space.{key}: expected the name of a field in each pair of braces, got {template!r}")
    return template


def _filled(template: str, record: Mapping[str, Any], where: str) -> str:
    try:
        return _Fields(where).vformat(template, (), record)
    except ValueError as error:
        raise TaskError(f"{where}: the template {template!r} cannot be filled: {error}") from None


# ---------------------------------------------------------------- conversations


def _with_system(
    record: Mapping[str, Any], messages: list[dict[str, Any]], where: str
) -> list[dict[str, Any]]:
    """Messages after that of the system, of records that have it in a field of its own."""
    if (said := record.get("system")) is None:
        return messages
    if messages and messages[0]["role"] == "system":
        raise TaskError(f"{where}: expected the system's message once, got a field 'system' and a message")
    return [{"role": "system", "content": text_of(said, "the field 'system'", where)}, *messages]


def _messages(value: Any, name: str, where: str) -> list[dict[str, Any]]:
    """Messages with roles and contents as chat templates expect them.

    Raises:
        TaskError: something else.
    """
    if not isinstance(value, list):
        raise TaskError(
            f"{where}: expected the field {name!r} to be a list of messages, got {kind_of(value)}"
        )
    found = []
    for number, message in enumerate(value):
        what = f"{name}[{number}]"
        if not isinstance(message, Mapping):
            raise TaskError(
                f"{where}: expected {what} to be an object with role and content, got {kind_of(message)}"
            )
        # Data sets of several forms have null for the other.
        role = message.get("role") or message.get("from")
        content = message["content"] if message.get("content") is not None else message.get("value")
        role = _ROLES.get(str(role), role)
        if role not in _KNOWN:
            raise TaskError(
                f"{where}: expected {what} to have one of the roles {', '.join(_KNOWN)}; got {role!r}"
            )
        if isinstance(content, list):  # of parts
            content = "".join(_part(part, what, where) for part in content)
        elif content is None and message.get("tool_calls"):
            content = ""
        else:
            content = text_of(content, f"the content of {what}", where)
        others = {
            key: other
            for key, other in message.items()
            if key not in ("role", "from", "content", "value") and other is not None
        }
        found.append({**others, "role": role, "content": content})
    return found


def _trains(message: Mapping[str, Any], what: str, where: str) -> bool:
    """Whether a message of the assistant counts: OpenAI's `weight`, and `train`, may say that it does not."""
    for name in ("weight", "train"):
        if (value := message.get(name, True)) not in (0, 1):
            raise TaskError(f"{where}: expected {name!r} of {what} to be 0 or 1, got {value!r}")
        if not value:
            return False
    return True


def _part(part: Any, what: str, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type", "text") != "text":
        raise TaskError(
            f"{where}: expected parts of text alone in {what}, got one of type {part['type']!r}: models here read text"
        )
    return text_of(part.get("text") if isinstance(part, Mapping) else part, f"each part of {what}", where)


def _rendering(tokens: Tokens, record: Mapping[str, Any], where: str) -> Callable[..., str]:
    """A function that renders some messages of a record by the tokenizer's chat template, and what asks for another if `asks`.

    Raises:
        TaskError: there is no template; of the function: it fails.
    """
    template: Any = tokens
    if not getattr(template, "chat_template", None):
        raise TaskError(
            f"{where}: expected a tokenizer with a chat template for messages, got none. Name one that has it: "
            "tokenizer: NAME; or write chat_template: FILE."
        )
    tools = record.get("tools")
    if isinstance(tools, str):
        with suppress(ValueError):
            tools = json.loads(tools)
    if not isinstance(tools, list | None):
        raise TaskError(
            f"{where}: expected the field 'tools' to be a list, or JSON text of one, got {kind_of(tools)}"
        )
    options = record.get("chat_template_kwargs") or {}
    if not isinstance(options, Mapping):
        raise TaskError(
            f"{where}: expected the field 'chat_template_kwargs' to be an object, got {kind_of(options)}"
        )

    def rendered(some: list[dict[str, Any]], *, asks: bool = False) -> str:
        try:
            text: str = template.apply_chat_template(
                some, tools=tools, tokenize=False, add_generation_prompt=asks, **options
            )
        except Exception as error:  # of the template
            raise TaskError(f"{where}: the tokenizer's chat template fails: {error}") from None
        return text

    return rendered


def _chat(
    messages: list[dict[str, Any]],
    record: Mapping[str, Any],
    tokens: Tokens,
    turns: Turns,
    where: str,
    begins: int = 0,
) -> Text:
    """A conversation by the tokenizer's own template, of which the assistant's turns count.

    A turn is what the template adds for it after what asks for one, without the space that follows. Every token in it is
    found by rendering the conversation up to it, so no template has to mark it.

    Args:
        begins: message from which on turns count.

    Raises:
        TaskError: there is no template, it fails, or it writes a turn otherwise once others follow.
    """
    rendered = _rendering(tokens, record, where)
    if not messages:
        raise TaskError(f"{where}: expected at least one message, got none")

    def until(number: int) -> str:
        """The text up to the content of one of the assistant's messages."""
        if number:
            return rendered(messages[:number], asks=True)
        # Nothing asks for a first message: it begins where another content would.
        return rendered([{**messages[0], "content": _ELSE}, *messages[1:]]).partition(_ELSE)[0]

    whole = rendered(messages)
    for number, message in enumerate(messages):
        # Without what was thought, which templates move; results of tools may be quoted.
        said = message["content"].rpartition("</think>")[2].strip()
        if message["role"] != "tool" and said not in whole:
            raise TaskError(
                f"{where}: expected the chat template to render the content of messages[{number}], got a text without it. "
                "Use another chat template, or change the data."
            )
    answers = [
        number for number, turn in enumerate(messages) if turn["role"] == "assistant" and number >= begins
    ]
    answers = [number for number in answers if _trains(messages[number], f"messages[{number}]", where)]
    parts: list[tuple[str, bool]] = []
    at = 0
    for number in answers[-1:] if turns == "last" else answers:
        before = until(number)
        through = (whole if number == len(messages) - 1 else rendered(messages[: number + 1])).rstrip()
        if not (whole.startswith(before) and whole.startswith(through) and at <= len(before) <= len(through)):
            advice = (
                "Write turns: last." if turns == "all" and len(answers) > 1 else "Use another chat template."
            )
            raise TaskError(
                f"{where}: expected the chat template to render messages[{number}] the same way up to it and within the whole "
                f"conversation, got other text, so its tokens cannot be located. {advice}"
            )
        parts += [(whole[at : len(before)], False), (whole[len(before) : len(through)], True)]
        at = len(through)
    opening = rendered(messages[:1]) if messages[0]["role"] == "system" and len(messages) > 1 else ""
    head = len(opening) if whole.startswith(opening) else 0
    return Text((*parts, (whole[at:], False)), is_chat=True, head=head)


# ---------------------------------------------------------------- tokens


def tokenized(made: Iterable[Text], tokens: Tokens, *, train_on_prompt: bool) -> Iterator[Document]:
    """Each document's tokens. One that no chat template made begins as the tokenizer begins text, and ends with its token for
    that, if it has one; where the text has them already, they are not added.
    """
    begins, ends = _frame(tokens)
    for chunk in _chunks(list(made), 1000):
        for text, (ids, counts, head) in zip(chunk, _encoded(chunk, tokens), strict=True):
            if not text.is_chat:
                if ids[: len(begins)] != begins:
                    ids, counts = begins + ids, [text.parts[0][1]] * len(begins) + counts
                said = text.whole.rstrip()
                if ends and not (ends[0] in ids and said.endswith(tokens.decode(ends))):
                    ids, counts = ids + ends, [*counts, True]
                head = len(begins)
            yield Document(ids, None if train_on_prompt or all(counts) else counts, head)


def _frame(tokens: Tokens) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before a text, and the token that ends one."""
    begins = []
    if tokens.bos_token_id is not None:
        ids = tokens(["a"], add_special_tokens=True)["input_ids"][0]
        begins = [tokens.bos_token_id] if ids[0] == tokens.bos_token_id else []
    return begins, [] if tokens.eos_token_id is None else [tokens.eos_token_id]


def _encoded(made: Sequence[Text], tokens: Any) -> Iterator[tuple[list[int], list[bool], int]]:
    """Tokens of each whole text, which count if any of their characters does, and how many are its head; of tokenizers that do
    not know the characters of their tokens, part by part.

    Raises:
        TaskError: such a tokenizer for conversations.
    """
    if getattr(tokens, "is_fast", False):
        # Else nobody asks which characters are whose.
        mixed = len({counted for text in made for _, counted in text.parts}) > 1
        encoded = tokens(
            [text.whole for text in made], add_special_tokens=False, return_offsets_mapping=mixed
        )
        for number, (text, ids) in enumerate(zip(made, encoded["input_ids"], strict=True)):
            offsets = encoded["offset_mapping"][number] if mixed else ()
            whose = _overlapping(text, offsets) if mixed else [text.parts[0][1]] * len(ids)
            yield list(ids), list(whose), sum(end <= text.head for _, end in offsets) if text.head else 0
        return
    if any(text.is_chat for text in made):
        raise TaskError(
            f"space.tokenizer: expected a fast tokenizer, since messages need character offsets; got {type(tokens).__name__}. "
            "Name one with a tokenizer.json."
        )
    pieces = iter(
        tokens([part for text in made for part, _ in text.parts], add_special_tokens=False)["input_ids"]
    )
    for text in made:
        ids, counts = [], []
        for _, counted in text.parts:
            piece = next(pieces)
            ids += piece
            counts += [counted] * len(piece)
        yield ids, counts, 0


def _overlapping(text: Text, offsets: Iterable[tuple[int, int]]) -> Iterator[bool]:
    """Whether each token has a character of a part that counts."""
    ends = list(accumulate(len(part) for part, _ in text.parts))
    for begin, end in offsets:
        first, last = bisect_right(ends, begin), bisect_right(ends, max(end - 1, begin))
        yield any(counted for _, counted in text.parts[first : last + 1])


def _chunks(values: Sequence[Text], size: int) -> Iterator[Sequence[Text]]:
    return (values[at : at + size] for at in range(0, len(values), size))


# ---------------------------------------------------------------- validation


def held_out(made: Sequence[Text], share: float | None) -> tuple[list[Text], list[Text]]:
    """Documents for training and for validation: every tenth, or a share by a digest of their text, so that the same text is on
    one side whatever other documents there are.

    Raises:
        TaskError: there are too few.
    """
    if share is not None:
        sides: tuple[list[Text], list[Text]] = ([], [])
        for text in made:
            sides[_drawn(text.whole) < share].append(text)
        if not all(sides):
            raise TaskError(
                "space.validation_share: expected at least one document for training and one for validation, got "
                f"{len(sides[0])} and {len(sides[1])} with a share of {share:g}. Write another share, or validation_text: PATH."
            )
        return sides
    if len(made) < _HELD_OUT:
        raise TaskError(
            f"space.text: expected at least {_HELD_OUT} documents, every tenth for validation, got {len(made)}. Name "
            "validation_text, or give each document a file or a line of .jsonl."
        )
    rest = [text for number, text in enumerate(made) if number % _HELD_OUT != _HELD_OUT - 1]
    return rest, list(made[_HELD_OUT - 1 :: _HELD_OUT])


def _drawn(text: str) -> float:
    """A number in [0, 1) that belongs to a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64
