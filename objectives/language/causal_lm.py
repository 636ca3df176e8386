"""A causal language model of `transformers` as a task: trained from scratch, fine-tuned whole, or with LoRA."""

from __future__ import annotations

import inspect
import logging
import math
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ...spaces.errors import OutputError, TaskError, near_miss
from ...spaces.trial import TrialSetup
from ..optimizers import named_optimizer
from ..task import Data, Loss, Score, Task
from .packing import IGNORED, Rows, document_mask, pack, positions
from .text import Bytes, Templates, Tokens, held_out, read_documents, tokenized

_LONGEST = 1024  # tokens of a row by default, at most
_ATTENTION = ("documents", "rows")
_QUANTIZED = ("8bit", "4bit")
_KERNEL = "bsearch_sdpa"


class CausalLM(Task):
    """Predicts the next token; a sample is a row of packed documents."""

    def data(self, setup: TrialSetup) -> Data:
        options = setup.parameters
        _attention(setup)
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
        )
        train, validation = (TensorDataset(part.tokens, part.labels, part.segments) for part in rows)
        return Data(train, validation, lengths=rows[0].lengths, unit="tokens")

    def model(self, setup: TrialSetup) -> nn.Module:
        model = _frozen_or_whole(setup)
        model.config.use_cache = False
        tokens = _tokens(_tokenizer(setup))
        if (most := len(tokens)) > model.config.vocab_size:  # type: ignore[arg-type]
            raise TaskError(f"space.tokenizer: expected at most the model's {model.config.vocab_size} tokens, got {most}")
        whole: nn.Module = _with_adapters(model, setup) if "lora_rank" in setup.parameters else model
        return whole

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        tokens, labels, segments = batch
        options: dict[str, Any] = {}
        if _attention(setup) == "documents":
            options["attention_mask"] = document_mask(segments)
            if _takes_positions(model):
                options["position_ids"] = positions(segments)
        logits: Tensor = model(input_ids=tokens.long(), use_cache=False, **options).logits
        total = nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten().long(), ignore_index=IGNORED, reduction="sum"
        )
        return Loss(total, (labels != IGNORED).sum())

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
    text: str, validation_text: str, files: str, templates: Templates, train_on_prompt: bool, tokenizer: str, length: int
) -> tuple[Rows, Rows]:
    """Packed rows for training and for validation."""
    train = read_documents(Path(text), templates, files, "text")
    if validation_text:
        validation = read_documents(Path(validation_text), templates, files, "validation_text")
    else:
        train, validation = held_out(train)
    tokens = _tokens(tokenizer)
    first, second = (
        pack(list(tokenized(part, tokens, train_on_prompt=train_on_prompt)), length) for part in (train, validation)
    )
    return first, second


def _length(setup: TrialSetup) -> int:
    config = _config(_source(setup, "model"))
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


# ---------------------------------------------------------------- models


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
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # Without a function for its masks, so that a mask is what the task gives, or none and the causal kernel. The library's own
    # looks at positions for packed rows, and takes another kernel when it is traced.
    transformers.AttentionInterface.register(_KERNEL, sdpa_attention_forward)
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
    source, options = _source(setup, "model"), {"attn_implementation": _KERNEL}
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


def _takes_positions(model: nn.Module) -> bool:
    inner: Any = model
    if hasattr(inner, "get_base_model"):  # under adapters
        inner = inner.get_base_model()
    return "position_ids" in inspect.signature(inner.forward).parameters


__all__ = ["CausalLM"]
