"""A row as it is trained, against its documents alone under `transformers`' eager attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ..task import Data
from .attention import documents, own_attention
from .packing import positions

# Rows that are searched for the one to compare.
_LOOKED_AT = 256
# Tokens of it that are compared.
_COMPARED = 1024


def logits_of(model: nn.Module, tokens: Tensor, segments: Tensor | None) -> Tensor:
    """(n, length, tokens) of rows, within their documents if `segments` tells them apart."""
    options = {} if segments is None else {"position_ids": positions(segments)}
    with documents(segments):
        logits: Tensor = model(input_ids=tokens.long(), use_cache=False, **options).logits
    return logits


def compared(model: nn.Module, data: Data, *, divided: bool) -> tuple[float, float]:
    """Two relative differences of logits: of a row as it is trained, with its padding, to those under eager attention, of each
    document alone if rows are `divided`, else of the whole row; and of the row's first half to the half alone, which tells
    models that are not causal.
    """
    rows: TensorDataset = data.train  # type: ignore[assignment]
    tokens, _, segments = rows.tensors
    lengths = data.lengths or []
    # That with the most documents, and of those the fullest.
    row = max(range(min(len(lengths), _LOOKED_AT)), key=lambda row: (int(segments[row].max()), lengths[row]))
    device = next(model.parameters()).device
    padded, parts = (part[row, :_COMPARED].to(device)[None] for part in (tokens, segments))
    end = min(lengths[row], _COMPARED)
    ids, training, half = padded[:, :end], model.training, (end + 1) // 2
    pieces = torch.split(ids, torch.bincount(parts[0, :end]).tolist() if divided else end, 1)
    model.eval()
    try:
        with torch.no_grad():
            with own_attention(model):
                alone = torch.cat([logits_of(model, piece, None) for piece in pieces], 1)
                ahead = _relative(
                    logits_of(model, ids, None)[:, :half], logits_of(model, ids[:, :half], None)
                )
            off = _relative(logits_of(model, padded, parts if divided else None)[:, :end], alone)
    finally:
        model.train(training)
    return off, ahead


def _relative(logits: Tensor, other: Tensor) -> float:
    return float((logits - other).float().norm() / other.float().norm().clamp_min(1e-30))
