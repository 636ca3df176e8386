"""Documents as rows of equal length: every token once, no document cut that fits, none seen by another."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

IGNORED = -100  # a label that the loss leaves out


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids, and how many of the first are a prompt, which the loss leaves out."""

    tokens: Sequence[int]
    prompt: int = 0


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed documents.

    Args:
        tokens: (rows, length) int32; padding is token 0.
        labels: (rows, length) int32: the token that follows within the document, or IGNORED.
        segments: (rows, length) int32: the document within the row, counted from 0; padding is one of its own.
        lengths: (rows,) tokens without padding.
    """

    tokens: Tensor
    labels: Tensor
    segments: Tensor
    lengths: list[int]


def pack(documents: Sequence[Document], length: int, *, alone: bool = False) -> Rows:
    """Pack documents into rows, the longest first, each into the fullest row that has room for it.

    A longer document continues in a row that begins with its last token, so that each of its tokens is predicted once.

    Args:
        alone: each document, or part of one, has a row of its own.

    >>> rows = pack([Document([5, 6, 7]), Document([8, 9]), Document([1, 2, 3, 4], prompt=2)], 5)
    >>> rows.tokens.tolist(), rows.segments.tolist()
    ([[5, 6, 7, 8, 9], [1, 2, 3, 4, 0]], [[0, 0, 0, 1, 1], [0, 0, 0, 0, 1]])
    >>> rows.labels.tolist()
    [[6, 7, -100, 9, -100], [-100, 3, 4, -100, -100]]
    """
    pieces = [piece for document in documents for piece in _pieces(document, length)]
    sizes = [len(piece.tokens) for piece in pieces]
    placed = [[member] for member in range(len(pieces))] if alone else best_fit(sizes, length)
    shape = len(placed), length
    tokens, labels = np.zeros(shape, np.int32), np.full(shape, IGNORED, np.int32)
    segments, lengths = np.zeros(shape, np.int32), []
    for row, members in enumerate(placed):
        at = 0
        for segment, member in enumerate(members):
            piece = pieces[member]
            end = at + len(piece.tokens)
            tokens[row, at:end], segments[row, at:end] = piece.tokens, segment
            counted = at + max(piece.prompt - 1, 0)  # the prompt's last token predicts the first that counts
            labels[row, counted : end - 1] = tokens[row, counted + 1 : end]
            at = end
        segments[row, at:] = len(members)
        lengths.append(at)
    return Rows(torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(segments), lengths)


def _pieces(document: Document, length: int) -> Iterator[Document]:
    for start in range(0, max(len(document.tokens) - 1, 1), length - 1):
        yield Document(document.tokens[start : start + length], max(document.prompt - start, 0))


def best_fit(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Bins of items whose sizes sum to at most `room` each; bins and their items in the order of their first item.

    >>> best_fit([3, 2, 4, 1, 5], 5)
    [[0, 1], [2, 3], [4]]
    """
    bins: list[list[int]] = []
    with_room: defaultdict[int, list[int]] = defaultdict(list)
    rooms: list[int] = []  # those that occur, sorted
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        size = sizes[item]
        place = bisect_left(rooms, size)
        if place == len(rooms):
            bins.append([item])
            left, chosen = room - size, len(bins) - 1
        else:
            fullest = rooms[place]
            chosen = with_room[fullest].pop()
            if not with_room[fullest]:
                rooms.pop(place)
            bins[chosen].append(item)
            left = fullest - size
        if left > 0:
            if not with_room[left]:
                insort(rooms, left)
            with_room[left].append(chosen)
    return sorted((sorted(members) for members in bins), key=lambda members: members[0])


def positions(segments: Tensor) -> Tensor:
    """Each token's place within its document, (n, length) int64."""
    here = torch.arange(segments.shape[1], device=segments.device).expand(segments.shape)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return here - torch.where(begins, here, 0).cummax(1).values
