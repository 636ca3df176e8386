"""A model of a configuration without its weights, to trace the memory of its training on a card that is not here."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ...spaces.trial import TrialSetup
from ..task import Data, Loss
from .causal_lm import CausalLM, with_adapters
from .comparison import logits_of
from .pretrained import config_of, family_here, length_of, source_of, transformers_here

# Rows that stand for a data set: as many as show which dimension is the batch.
_ROWS = 8


class Imagined(CausalLM):
    """Full rows of one document each, and weights whose memory is never touched, so that models larger than this machine can be
    traced as their own libraries train them. It has `CausalLM`'s parameters without those of text.
    """

    def data(self, setup: TrialSetup) -> Data:
        length = length_of(setup)
        tokens = torch.zeros((_ROWS, length), dtype=torch.int32)
        rows = TensorDataset(tokens, tokens, tokens)
        return Data(rows, rows, lengths=[length] * _ROWS, unit="tokens")

    def model(self, setup: TrialSetup) -> nn.Module:
        source = source_of(setup, "model")
        config: Any = copy.deepcopy(config_of(source))
        config.use_cache = False
        with torch.device("meta"):
            model = transformers_here().AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, str(setup.parameters["dtype"])), attn_implementation=family_here(source).kernel
            )
            whole = with_adapters(model, setup) if "lora_rank" in setup.parameters else model
        whole.to_empty(device="cpu")
        model.tie_weights()
        made: nn.Module = whole.train()
        return made

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        """That of `transformers`, which recipes train with: float32 logits of all tokens at once."""
        tokens, labels, _ = batch
        logits = logits_of(model, tokens, None)
        total = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten().long(), reduction="sum")
        return Loss(total, torch.tensor(labels.numel()))


def saved_bytes(model: nn.Module, quantized: float | None) -> int:
    """Bytes that frozen linear layers save where a weight takes `quantized` bytes; the largest layer is unpacked at a time."""
    if quantized is None:
        return 0
    frozen = [
        module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not module.weight.requires_grad and not name.endswith("lm_head")
    ]
    now = sum(weight.numel() * weight.element_size() for weight in frozen)
    packed = sum(weight.numel() for weight in frozen) * quantized
    unpacked = max((weight.numel() * weight.element_size() for weight in frozen), default=0)
    return max(int(now - packed) - unpacked, 0)
