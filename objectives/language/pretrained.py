"""Configurations, tokenizers and weights as `transformers` loads them, by what a study names."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from ...spaces.errors import TaskError, near_miss
from ...spaces.trial import TrialSetup
from .attention import Family, family_of, register
from .text import Bytes, Tokens

_LONGEST = 1024  # tokens of a row by default, at most
_ATTENTION = ("documents", "rows")


def path_of(setup: TrialSetup, key: str) -> Path:
    return setup.path(str(setup.parameters[key]))


def source_of(setup: TrialSetup, key: str) -> str:
    """A folder beside the study, or else a name on the hub."""
    if key not in setup.parameters:
        raise TaskError(
            f"space.{key}: expected a folder or a name on the hub. Write {key}: NAME under space:."
        )
    path = path_of(setup, key)
    return str(path) if path.exists() else str(setup.parameters[key])


def tokenizer_of(setup: TrialSetup) -> str:
    return source_of(setup, "tokenizer" if "tokenizer" in setup.parameters else "model")


def chat_template_of(setup: TrialSetup) -> str:
    """The path of the study's own chat template; empty: the tokenizer's."""
    return str(path_of(setup, "chat_template")) if "chat_template" in setup.parameters else ""


def flag(setup: TrialSetup, key: str) -> bool:
    """A parameter that is true or false.

    Raises:
        TaskError: it is something else, such as the word in quotes.
    """
    value = setup.parameters.get(key, False)
    if not isinstance(value, bool):
        raise TaskError(f"space.{key}: expected true or false, got {value!r}")
    return value


def tokens_here(setup: TrialSetup) -> Tokens:
    """The study's tokenizer, with its chat template."""
    return tokens_of(tokenizer_of(setup), chat_template_of(setup))


def transformers_here() -> Any:
    try:
        import transformers
    except ImportError:
        raise TaskError("CausalLM needs transformers: pip install transformers") from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    register(transformers)
    return transformers


def loaded(kind: str, source: str, key: str, **options: Any) -> Any:
    """`from_pretrained` of one of its Auto classes.

    Raises:
        TaskError: it is neither a folder nor on a hub that can be reached.
    """
    try:
        return getattr(transformers_here(), kind).from_pretrained(source, **options)
    except (OSError, ValueError) as error:
        raise TaskError(
            f"space.{key}: expected a folder of `transformers`, or a name on a hub that can be reached from here, got "
            f"{source!r}: {str(error).splitlines()[0]}"
        ) from None


@lru_cache(maxsize=4)
def config_of(source: str) -> Any:
    return loaded("AutoConfig", source, "model")


@lru_cache(maxsize=4)
def family_here(source: str) -> Family:
    return family_of(transformers_here(), config_of(source))


@lru_cache(maxsize=4)
def tokens_of(source: str, chat_template: str = "") -> Tokens:
    """A tokenizer.

    Args:
        chat_template: a file with one, instead of the tokenizer's own.
    """
    tokens: Any = Bytes() if source == "bytes" else loaded("AutoTokenizer", source, "tokenizer")
    if chat_template and source == "bytes":
        raise TaskError(
            "space.chat_template: expected a tokenizer that can use it, got bytes. Name one of `transformers`."
        )
    if chat_template:
        try:
            tokens.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TaskError(f"space.chat_template: expected a file with a template: {error}") from None
    return tokens  # type: ignore[no-any-return]


def length_of(setup: TrialSetup) -> int:
    config = config_of(source_of(setup, "model")).get_text_config(decoder=True)
    most = (
        getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or _LONGEST
    )
    length = setup.parameters.get("length", min(most, _LONGEST))
    if not isinstance(length, int) or not 2 <= length <= most:
        raise TaskError(
            f"space.length: expected 2 to {most} tokens, which is what the model takes, got {length!r}"
        )
    return length


def attention_of(setup: TrialSetup) -> str:
    chosen = str(setup.parameters.get("attention", "documents"))
    if chosen not in _ATTENTION:
        raise TaskError(
            f"space.attention: expected documents or rows, got {chosen!r}.{near_miss(chosen, _ATTENTION)}"
        )
    return chosen


def packs(setup: TrialSetup) -> bool:
    """Whether a row holds several documents."""
    packing, family = setup.parameters.get("packing"), family_here(source_of(setup, "model"))
    if packing not in (None, True, False):
        raise TaskError(f"space.packing: expected true or false, got {packing!r}")
    apart = attention_of(setup) == "documents"
    if packing is False and not apart:
        raise TaskError(
            "space.packing: expected true with attention: rows, whose rows hold several documents; got false"
        )
    if packing and apart and family.leaks:
        raise TaskError(
            f"space.packing: expected false, since {family.reason}; got true. Or write attention: rows."
        )
    return not apart or bool(packing) or (packing is None and not family.reason)


def divides(setup: TrialSetup) -> bool:
    """Whether masks keep the documents of a row apart: it holds several, and they are not to see each other."""
    return packs(setup) and attention_of(setup) == "documents"
