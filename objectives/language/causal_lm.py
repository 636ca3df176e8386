"""A causal language model of `transformers` as a task: trained from scratch, fine-tuned whole, or with LoRA."""

from __future__ import annotations

import copy
import json
import logging
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ...spaces.errors import OutputError, TaskError, near_miss
from ...spaces.laws.examination import Finding
from ...spaces.trial import TrialSetup
from ..loading import error_line
from ..optimizers import named_optimizer
from ..task import Data, Loss, Score, Task
from .comparison import compared, logits_of
from .corpus import corpus_of
from .packing import IGNORED
from .pretrained import (
    config_of,
    divides,
    family_here,
    flag,
    loaded,
    packs,
    source_of,
    tokens_here,
    transformers_here,
)
from .text import Bytes
from .token_loss import summed_cross_entropy

# As QLoRA has it: Dettmers et al. 2023, arXiv 2305.14314.
_QUANTIZED: dict[Any, dict[str, Any]] = {
    "8bit": {"load_in_8bit": True},
    "4bit": {
        **{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        "bnb_4bit_compute_dtype": torch.bfloat16,
    },
}
_VARIANTS = ("lora", "dora", "rslora")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Relative differences of logits that are taken for rounding; half precision alone rounds at 4e-3 and more.
_SAME = {torch.float32: 1e-4, torch.float64: 1e-8}
_SAME_IN_HALF = 3e-2


class CausalLM(Task):
    """Predicts the next token; a sample is a row of packed documents, or of one where the model would mix several."""

    def data(self, setup: TrialSetup) -> Data:
        corpus = corpus_of(setup)
        train, validation = (
            TensorDataset(part.tokens, part.labels, part.segments)
            for part in (corpus.train, corpus.validation)
        )
        return Data(train, validation, lengths=corpus.train.lengths, unit="tokens", weights=corpus.weights)

    def model(self, setup: TrialSetup) -> nn.Module:
        model = _frozen_or_whole(setup)
        config = model.config.get_text_config(decoder=True)
        model.config.use_cache = config.use_cache = False
        tokens = tokens_here(setup)
        adapts = "lora_rank" in setup.parameters
        if flag(setup, "lora_merge") and not adapts:
            raise TaskError(
                "space.lora_merge: expected lora_rank with it, whose adapters are merged. Write lora_rank: 16."
            )
        if new := max(len(tokens) - config.vocab_size, 0):  # type: ignore[arg-type]
            model.resize_token_embeddings(len(tokens))  # type: ignore[arg-type]
        whole: nn.Module = _with_adapters(model, setup) if adapts else model
        if new and adapts and not all(embedding.weight.requires_grad for embedding in _embeddings(whole)):
            raise TaskError(
                f"space.lora_trained: expected the embeddings among them, since {new} tokens of the tokenizer are new to the "
                f"model. Write lora_trained: {', '.join(_embedding_names(model))}"
            )
        return whole.train()  # `from_pretrained` switches dropout off

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        tokens, labels, segments = batch
        logits = logits_of(model, tokens, segments if divides(setup) else None)
        total = summed_cross_entropy(logits.flatten(0, 1), labels.flatten().long())
        return Loss(total, (labels != IGNORED).sum())

    def examine(self, model: nn.Module, data: Data, setup: TrialSetup) -> Iterator[Finding]:
        """What the rows are made of; and a row against its documents alone, under `transformers`' eager attention."""
        corpus = corpus_of(setup)
        yield Finding("rows", "space.text", corpus.sentence)
        yield from (
            Finding("rows", "space.text", f"a document, «what counts» marked: {sample}")
            for sample in corpus.samples
        )
        known = config_of(source_of(setup, "model")).get_text_config(decoder=True).vocab_size
        if (tokens := len(tokens_here(setup))) > known:  # type: ignore[arg-type]
            message = (
                f"the tokenizer has {tokens:,} tokens, the model {known:,}: embeddings of the others are "
                "newly initialized"
            )
            yield Finding("rows", "space.tokenizer", message)
        if weight := getattr(model.config, "router_aux_loss_coef", 0.0):
            message = (
                f"expected a model whose loss is a sum over tokens, got {type(model).__name__}, a mixture of experts with an "
                f"auxiliary loss over the batch (router_aux_loss_coef {weight:g}), which would be left out: nothing would keep "
                "its experts in balance. Write a Task of your own with couples_samples."
            )
            yield Finding("coupled", "space.model", message)
        if not packs(setup):
            family = family_here(source_of(setup, "model"))
            filled = sum(corpus.train.lengths) / corpus.train.tokens.numel()
            why = f", since {family.reason}" if "packing" not in setup.parameters else ""
            yield Finding(
                "rows",
                "space.packing",
                f"a row is one document{why}; {filled:.0%} of the rows' tokens are text",
            )
        try:
            off, ahead = compared(model, data, divided=divides(setup))
        except Exception as error:  # memory runs out, or a model of its own kind has no eager attention
            message = f"a row could not be compared with its documents alone: {error_line(error)}"
            yield Finding("rows", "space.model", message)
            return
        most, name = _SAME.get(next(model.parameters()).dtype, _SAME_IN_HALF), type(model).__name__
        if ahead > most:
            message = f"expected a causal model, whose tokens see none that follow; got {name}, whose logits change with them"
            yield Finding("causal", "space.model", f"{message} (relative difference {ahead:.1g})", ahead)
        elif off > most:
            what = (
                "documents of a packed row see each other"
                if divides(setup)
                else "a row differs from eager attention"
            )
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
        """The model, in the precision that it came in, or its adapters, and the tokenizer, as `from_pretrained` reads them."""
        whole: Any = _merged(model) if flag(setup, "lora_merge") else model
        tokens = tokens_here(setup)
        loaded_whole = not (hasattr(whole, "get_base_model") or flag(setup, "from_scratch"))
        came = config_of(source_of(setup, "model")).dtype if loaded_whole else None
        options: dict[str, Any] = {}
        if came not in (None, whole.dtype):
            state: dict[str, Any] = {}
            cast: dict[Any, Any] = {}
            for name, tensor in whole.state_dict().items():
                key = (tensor.data_ptr(), tensor.shape, tensor.stride())  # what is tied stays so
                state[name] = cast.setdefault(key, tensor.to(came) if tensor.is_floating_point() else tensor)
            options["state_dict"] = state
        try:
            whole.save_pretrained(str(folder), **options)
            path = folder / "config.json"
            if path.exists():  # it has what training needs: no cache, and the precision in memory
                config = json.loads(path.read_text(encoding="utf-8"))
                dtype = str(came).removeprefix("torch.") if options else None
                path.write_text(json.dumps(_as_it_came(config, dtype), indent=2) + "\n", encoding="utf-8")
            saved: Any = tokens.of_transformers() if isinstance(tokens, Bytes) else tokens
            saved.save_pretrained(str(folder))
        except OSError as error:
            raise OutputError(f"{folder}: the model cannot be written: {error}") from None


def _merged(model: Any) -> nn.Module:
    """A copy of a model with its adapters merged into its weights, in single precision at least.

    What was tied and is changed on one side is untied, so that the merged model computes what the adapters did.
    """
    whole = copy.deepcopy(model).cpu()
    whole = whole.float() if next(whole.parameters()).dtype in (torch.bfloat16, torch.float16) else whole
    base = whole.get_base_model()
    ends = [base.get_input_embeddings(), base.get_output_embeddings()]
    if base.config.get_text_config(decoder=True).tie_word_embeddings and any(
        hasattr(end, "lora_A") for end in ends
    ):
        output = getattr(ends[1], "base_layer", ends[1])
        output.weight = nn.Parameter(output.weight.detach().clone())
        for config in (base.config, base.config.get_text_config(decoder=True)):
            config.tie_word_embeddings = False
    merged: nn.Module = whole.merge_and_unload()
    return merged


def _as_it_came(config: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """A configuration, and those within it, with a cache for generating, and with this precision, if one is given."""
    found = {
        key: _as_it_came(value, dtype) if isinstance(value, dict) else value for key, value in config.items()
    }
    if "use_cache" in found:
        found["use_cache"] = True
    if dtype is not None and "dtype" in found:
        found["dtype"] = dtype
    return found


def _embeddings(model: Any) -> list[Any]:
    """The input's and the output's, of which peft keeps the trained ones beside the frozen ones."""
    found = [
        module
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
        if module is not None
    ]
    return [getattr(module, "modules_to_save", {"default": module})["default"] for module in found]


def _embedding_names(model: Any) -> list[str]:
    whose = {id(module) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    return [name.rpartition(".")[2] for name, module in model.named_modules() if id(module) in whose]


def _frozen_or_whole(setup: TrialSetup) -> Any:
    """The model, from scratch or with its weights."""
    source = source_of(setup, "model")
    options = {"attn_implementation": family_here(source).kernel}
    if flag(setup, "from_scratch"):
        if "lora_rank" in setup.parameters:
            raise TaskError(
                "space.lora_rank: expected a model with weights of its own, since adapters are saved alone; got "
                "from_scratch: true. Remove one of the two."
            )
        if "quantize" in setup.parameters:
            raise TaskError(
                "space.quantize: expected a model with weights of its own and lora_rank, got from_scratch: true."
            )
        dtype = _dtype(setup)
        # Which would take the configuration's precision.
        made = transformers_here().AutoModelForCausalLM.from_config
        return made(
            copy.deepcopy(config_of(source)), dtype=torch.float32 if dtype == "auto" else dtype, **options
        )
    quantized = setup.parameters.get("quantize")
    if quantized is None:
        return loaded("AutoModelForCausalLM", source, "model", dtype=_dtype(setup), **options)
    if quantized not in _QUANTIZED:
        raise TaskError(
            f"space.quantize: expected 8bit or 4bit, got {quantized!r}.{near_miss(quantized, _QUANTIZED)}"
        )
    if "lora_rank" not in setup.parameters:
        raise TaskError(
            "space.quantize: expected lora_rank with it, since quantized weights are not trained. Write lora_rank: 16."
        )
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise TaskError(f"space.quantize: {quantized} needs bitsandbytes: pip install bitsandbytes") from None
    config = transformers_here().BitsAndBytesConfig(**_QUANTIZED[quantized])
    return loaded(
        "AutoModelForCausalLM", source, "model", quantization_config=config, dtype=_dtype(setup), **options
    )


def _dtype(setup: TrialSetup) -> Any:
    """The precision of weights in memory: those that are trained in float32, and a frozen model in that of its files."""
    chosen = setup.parameters.get("dtype", "auto" if "lora_rank" in setup.parameters else "float32")
    if chosen not in ("auto", *_DTYPES):
        raise TaskError(
            f"space.dtype: expected auto, {', '.join(_DTYPES)}; got {chosen!r}.{near_miss(str(chosen), list(_DTYPES))}"
        )
    return _DTYPES.get(str(chosen), chosen)


def _with_adapters(model: Any, setup: TrialSetup) -> Any:
    # Peft imports it, and it warns of kernels that are not there.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise TaskError("space.lora_rank: LoRA needs peft: pip install peft") from None
    rank = setup.parameters["lora_rank"]
    if flag(setup, "lora_merge") and "quantize" in setup.parameters:
        raise TaskError(
            "space.lora_merge: expected weights that are not quantized, which would be rounded; got quantize."
        )
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise TaskError(
            f"space.lora_rank: expected an integer >= 1, got {rank!r}. Leave it out to train all weights."
        )
    variant = str(setup.parameters.get("lora_variant", _VARIANTS[0]))
    if variant not in _VARIANTS:
        near = near_miss(variant, _VARIANTS)
        raise TaskError(f"space.lora_variant: expected {', '.join(_VARIANTS)}; got {variant!r}.{near}")
    alpha, dropout = setup.parameters.get("lora_alpha", 2 * rank), setup.parameters.get("lora_dropout", 0.0)
    if isinstance(alpha, bool | str) or not alpha > 0:
        raise TaskError(f"space.lora_alpha: expected a number > 0, got {alpha!r}")
    if isinstance(dropout, bool | str) or not 0 <= dropout < 1:
        raise TaskError(f"space.lora_dropout: expected a number >= 0 and < 1, got {dropout!r}")
    trained = _modules(model, setup, "lora_trained")
    # What is tied in the model stays so, where this version of peft can.
    tied = bool(trained) and bool(model.config.get_text_config(decoder=True).tie_word_embeddings)
    keeps_tied = {"ensure_weight_tying": True} if tied and hasattr(LoraConfig, "ensure_weight_tying") else {}
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # any number will do
        lora_dropout=dropout,
        target_modules=_modules(model, setup, "lora_targets") or "all-linear",
        modules_to_save=trained or None,
        use_dora=variant == "dora",
        use_rslora=variant == "rslora",
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
        task_type="CAUSAL_LM",
        **keeps_tied,  # type: ignore[arg-type]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about what peft reads there
        # `_merged` unties them.
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings", UserWarning)
        # Of others than the tied.
        warnings.filterwarnings("ignore", "You have requested `ensure_weight_tying`", UserWarning)
        try:
            adapted = get_peft_model(model, config)
        except ValueError as error:  # modules of a kind that has no adapters
            raise TaskError(f"space.lora_targets: peft says: {str(error).splitlines()[0][:300]}") from None
    for parameter in adapted.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            # A module that is trained whole came in the precision of the files.
            parameter.data = parameter.data.float()
    return adapted


def _modules(model: Any, setup: TrialSetup, key: str) -> list[str]:
    """Modules that a parameter names, separated by commas.

    Raises:
        TaskError: the model has none of a name.
    """
    names = [name.strip() for name in str(setup.parameters.get(key, "")).split(",") if name.strip()]
    if key == "lora_targets" and names == ["all-linear"]:  # peft's name for what is done by default
        return []
    layers = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if getattr(module, "weight", None) is not None
    }
    for name in names:
        if not any(full == name or full.endswith(f".{name}") for full, _ in model.named_modules()):
            raise TaskError(
                f"space.{key}: expected modules of the model, got {name!r}.{near_miss(name, layers)} "
                f"There are {', '.join(sorted(layers))}."
            )
    return names
