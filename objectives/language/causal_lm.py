"""A causal language model of `transformers` as a task: trained from scratch, fine-tuned whole, or with LoRA."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ...spaces.errors import OutputError, TaskError, near_miss
from ...spaces.laws.examination import Finding
from ...spaces.trial import TrialSetup
from ..machine.device_memory import is_out_of_memory
from ..optimizers import named_optimizer
from ..task import Data, Loss, Score, Task
from .attention import Family, documents, family_of, own_attention, register
from .packing import IGNORED, Rows, pack, positions
from .text import Bytes, Templates, Tokens, held_out, read_documents, tokenized

_LONGEST = 1024  # tokens of a row by default, at most
_ATTENTION = ("documents", "rows")
_QUANTIZED = ("8bit", "4bit")
# Of logits, between a packed row and its documents alone; half precision rounds at 4e-3 and more.
_SAME = {torch.float32: 1e-4, torch.float64: 1e-8}
_SAME_IN_HALF = 3e-2
# Rows that are looked at to find one to compare, and tokens of it, at most.
_LOOKED_AT, _COMPARED = 256, 1024


class CausalLM(Task):
    """Predicts the next token; a sample is a row of packed documents, or of one where the model would mix several."""

    def data(self, setup: TrialSetup) -> Data:
        options = setup.parameters
        if "text" not in options:
            raise TaskError("space.text: expected a file or folder of text. Write text: PATH under space:.")
        rows = _rows(
            str(_path(setup, "text")),
            str(_path(setup, "validation_text")) if "validation_text" in options else "",
            str(options.get("files", "")),
            Templates(str(options.get("prompt", "")), str(options.get("completion", "{text}"))),
            bool(options.get("train_on_prompt", False)),
            _tokenizer(setup),
            _length(setup),
            not _packs(setup),
        )
        train, validation = (TensorDataset(part.tokens, part.labels, part.segments) for part in rows)
        return Data(train, validation, lengths=rows[0].lengths, unit="tokens")

    def model(self, setup: TrialSetup) -> nn.Module:
        model = _frozen_or_whole(setup)
        config = model.config.get_text_config(decoder=True)
        model.config.use_cache = config.use_cache = False
        tokens = _tokens(_tokenizer(setup))
        if (most := len(tokens)) > config.vocab_size:  # type: ignore[arg-type]
            raise TaskError(f"space.tokenizer: expected at most the model's {config.vocab_size} tokens, got {most}")
        whole: nn.Module = _with_adapters(model, setup) if "lora_rank" in setup.parameters else model
        return whole.train()  # `from_pretrained` switches dropout off

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        tokens, labels, segments = batch
        logits = _logits(model, tokens, segments if _packs(setup) and _attention(setup) == "documents" else None)
        total = nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten().long(), ignore_index=IGNORED, reduction="sum"
        )
        return Loss(total, (labels != IGNORED).sum())

    def examine(self, model: nn.Module, data: Data, setup: TrialSetup) -> Iterator[Finding]:
        """A row against its documents alone, by the attention that the model came with."""
        family, apart = _family(_source(setup, "model")), _attention(setup) == "documents"
        if not _packs(setup):
            rows: TensorDataset = data.train  # type: ignore[assignment]
            filled = sum(data.lengths or ()) / max(rows.tensors[0].numel(), 1)
            why = f", since {family.reason}" if "packing" not in setup.parameters else ""
            yield Finding("rows", "space.packing", f"a row is one document{why}; {filled:.0%} of the rows' tokens are text")
        found = _compared(model, data, packed=_packs(setup), apart=apart)
        most = _SAME.get(next(model.parameters()).dtype, _SAME_IN_HALF)
        if found is None:
            return
        name, (off, ahead) = type(model).__name__, found
        if ahead > most:
            message = f"expected a causal model, whose tokens see none that follow; got {name}, whose logits change with them"
            yield Finding("causal", "space.model", f"{message} (relative difference {ahead:.1g})", ahead)
        elif off > most:
            what = "the documents of a packed row see each other" if apart and _packs(setup) else "rows lack its own attention"
            message = f"{what} in {name} (relative difference of logits {off:.1g}). Write packing: false."
            yield Finding("packing", "space.model", message, off)

    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        return named_optimizer(model, setup, default="adamw")

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> dict[str, Score]:
        loss = self.loss(model, batch, setup)
        return {
            "val_loss": Score(loss.total, loss.denominator),
            "perplexity": Score(loss.total, loss.denominator, of=math.exp),
        }

    def save(self, model: nn.Module, folder: Path, setup: TrialSetup) -> None:
        """The model or its adapters, and the tokenizer, as `from_pretrained` reads them."""
        tokens = _tokens(_tokenizer(setup))
        try:
            model.save_pretrained(str(folder))  # type: ignore[operator]
            if not isinstance(tokens, Bytes):
                tokens.save_pretrained(str(folder))  # type: ignore[attr-defined]
        except OSError as error:
            raise OutputError(f"{folder}: the model cannot be written: {error}") from None


# ---------------------------------------------------------------- text


@lru_cache(maxsize=4)
def _rows(
    text: str,
    validation_text: str,
    files: str,
    templates: Templates,
    train_on_prompt: bool,
    tokenizer: str,
    length: int,
    alone: bool,
) -> tuple[Rows, Rows]:
    """Rows for training and for validation."""
    train = read_documents(Path(text), templates, files, "text")
    if validation_text:
        validation = read_documents(Path(validation_text), templates, files, "validation_text")
    else:
        train, validation = held_out(train)
    tokens = _tokens(tokenizer)
    first, second = (
        pack(list(tokenized(part, tokens, train_on_prompt=train_on_prompt)), length, alone=alone)
        for part in (train, validation)
    )
    return first, second


def _length(setup: TrialSetup) -> int:
    config = _config(_source(setup, "model")).get_text_config(decoder=True)
    most = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or _LONGEST
    length = setup.parameters.get("length", min(most, _LONGEST))
    if not isinstance(length, int) or not 2 <= length <= most:
        raise TaskError(f"space.length: expected 2 to {most} tokens, which is what the model takes, got {length!r}")
    return length


def _attention(setup: TrialSetup) -> str:
    chosen = str(setup.parameters.get("attention", "documents"))
    if chosen not in _ATTENTION:
        raise TaskError(f"space.attention: expected documents or rows, got {chosen!r}.{near_miss(chosen, _ATTENTION)}")
    return chosen


def _packs(setup: TrialSetup) -> bool:
    """Whether a row holds several documents."""
    packing, family = setup.parameters.get("packing"), _family(_source(setup, "model"))
    if packing not in (None, True, False):
        raise TaskError(f"space.packing: expected true or false, got {packing!r}")
    apart = _attention(setup) == "documents"
    if packing is False and not apart:
        raise TaskError("space.packing: expected true with attention: rows, whose rows hold several documents; got false")
    if packing and apart and family.leaks:
        raise TaskError(f"space.packing: expected false, since {family.reason}; got true. Or write attention: rows.")
    return not apart or bool(packing) or (packing is None and not family.reason)


# ---------------------------------------------------------------- models


@lru_cache(maxsize=4)
def _family(source: str) -> Family:
    return family_of(_transformers(), _config(source))


def _logits(model: nn.Module, tokens: Tensor, segments: Tensor | None) -> Tensor:
    """(n, length, tokens) of rows, within their documents if `segments` tells them apart."""
    options = {} if segments is None else {"position_ids": positions(segments)}
    with documents(segments):
        logits: Tensor = model(input_ids=tokens.long(), use_cache=False, **options).logits
    return logits


def _compared(model: nn.Module, data: Data, *, packed: bool, apart: bool) -> tuple[float, float] | None:
    """Relative differences of logits: of a row as it is trained to those by the model's own attention, of its documents alone
    where they are kept `apart`; and of a row's first half to those of the half alone. None where memory does not suffice.
    """
    rows: TensorDataset = data.train  # type: ignore[assignment]
    tokens, _, segments = rows.tensors
    lengths = data.lengths or []
    # That with the most documents, and of those the fullest.
    row = max(range(min(len(lengths), _LOOKED_AT)), key=lambda row: (int(segments[row].max()), lengths[row]))
    end = min(lengths[row], _COMPARED)
    device = next(model.parameters()).device
    ids, parts = tokens[row, :end].to(device)[None], segments[row, :end].to(device)[None]
    training, half = model.training, (end + 1) // 2
    pieces = torch.split(ids, torch.bincount(parts[0]).tolist(), 1) if packed and apart else (ids,)
    model.eval()
    try:
        with torch.no_grad():
            with own_attention(model):
                alone = torch.cat([_logits(model, piece, None) for piece in pieces], 1)
                ahead = _relative(_logits(model, ids, None)[:, :half], _logits(model, ids[:, :half], None))
            off = _relative(_logits(model, ids, parts if packed and apart else None), alone)
    except Exception as error:
        if is_out_of_memory(error):
            return None
        raise
    finally:
        model.train(training)
    return off, ahead


def _relative(one: Tensor, other: Tensor) -> float:
    return float((one - other).float().norm() / other.float().norm().clamp_min(1e-30))


def _path(setup: TrialSetup, key: str) -> Path:
    return setup.path(str(setup.parameters[key]))


def _source(setup: TrialSetup, key: str) -> str:
    """A folder beside the study, or else a name on the hub."""
    if key not in setup.parameters:
        raise TaskError(f"space.{key}: expected a folder or a name on the hub. Write {key}: NAME under space:.")
    path = _path(setup, key)
    return str(path) if path.exists() else str(setup.parameters[key])


def _tokenizer(setup: TrialSetup) -> str:
    return _source(setup, "tokenizer" if "tokenizer" in setup.parameters else "model")


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise TaskError("CausalLM needs transformers: pip install 'bsearch[language]'") from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    register(transformers)
    return transformers


def _loaded(kind: str, source: str, key: str, **options: Any) -> Any:
    """`from_pretrained` of one of its Auto classes.

    Raises:
        TaskError: it is neither a folder nor on a hub that can be reached.
    """
    try:
        return getattr(_transformers(), kind).from_pretrained(source, **options)
    except (OSError, ValueError) as error:
        raise TaskError(
            f"space.{key}: expected a folder of `transformers`, or a name on a hub that can be reached from here, got "
            f"{source!r}: {str(error).splitlines()[0]}"
        ) from None


@lru_cache(maxsize=4)
def _config(source: str) -> Any:
    return _loaded("AutoConfig", source, "model")


@lru_cache(maxsize=4)
def _tokens(source: str) -> Tokens:
    tokens: Tokens = Bytes() if source == "bytes" else _loaded("AutoTokenizer", source, "tokenizer")
    return tokens


def _frozen_or_whole(setup: TrialSetup) -> Any:
    """The model, from scratch or with its weights."""
    source = _source(setup, "model")
    options = {"attn_implementation": _family(source).kernel}
    if setup.parameters.get("from_scratch", False):
        return _transformers().AutoModelForCausalLM.from_config(_config(source), **options)
    quantized = setup.parameters.get("quantize")
    if quantized is None:
        return _loaded("AutoModelForCausalLM", source, "model", dtype=torch.float32, **options)
    if quantized not in _QUANTIZED:
        raise TaskError(f"space.quantize: expected 8bit or 4bit, got {quantized!r}.{near_miss(quantized, _QUANTIZED)}")
    if "lora_rank" not in setup.parameters:
        raise TaskError(
            "space.quantize: expected lora_rank with it, since quantized weights are not trained. Write lora_rank: 16."
        )
    if setup.device != "gpu":
        raise TaskError(f"space.quantize: expected a GPU, which bitsandbytes needs for {quantized}, got a CPU. Remove it here.")
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise TaskError(f"space.quantize: {quantized} needs bitsandbytes: pip install bitsandbytes") from None
    config = _transformers().BitsAndBytesConfig(load_in_8bit=quantized == "8bit", load_in_4bit=quantized == "4bit")
    return _loaded("AutoModelForCausalLM", source, "model", quantization_config=config, **options)


def _with_adapters(model: Any, setup: TrialSetup) -> Any:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it, and it warns of kernels that are not there
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise TaskError("space.lora_rank: LoRA needs peft: pip install 'bsearch[language]'") from None
    rank = setup.parameters["lora_rank"]
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise TaskError(f"space.lora_rank: expected an integer >= 1, got {rank!r}. Leave it out to train all weights.")
    names = [name.strip() for name in str(setup.parameters.get("lora_targets", "")).split(",") if name.strip()]
    layers = {name.rpartition(".")[2] for name, module in model.named_modules() if getattr(module, "weight", None) is not None}
    for name in names:
        if not any(full == name or full.endswith(f".{name}") for full, _ in model.named_modules()):
            raise TaskError(
                f"space.lora_targets: expected modules of the model, got {name!r}.{near_miss(name, layers)} "
                f"There are {', '.join(sorted(layers))}."
            )
    config = LoraConfig(
        r=rank,
        lora_alpha=setup.parameters.get("lora_alpha", 2 * rank),  # type: ignore[arg-type]  # any number will do
        lora_dropout=float(setup.parameters.get("lora_dropout", 0.0)),
        target_modules=names or "all-linear",
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about what peft reads there
        return get_peft_model(model, config)


__all__ = ["CausalLM"]
