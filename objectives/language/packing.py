"""Documents as rows of equal length: every token once, no document cut that fits, none seen by another."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

IGNORED = -100  # a label that the loss leaves out


# What becomes of a document that is longer than a row: it goes on in others, is left out, or loses the beginning of its prompt,
# after what opens it.
TooLong = Literal["split", "drop", "cut_prompt"]


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids, and which of them the loss counts; None: all.

    Args:
        head: tokens that open it, such as the system's message, and stay where a prompt is cut.
    """

    tokens: Sequence[int]
    counts: Sequence[bool] | None = None
    head: int = 0

    @property
    def counted(self) -> int:
        """Tokens that are predicted and count: never the first, which nothing comes before."""
        return len(self.tokens) - 1 if self.counts is None else sum(self.counts[1:])

    def without_prompt(self, count: int) -> Document | None:
        """Without the first `count` tokens after its head; None: some of them count."""
        if self.counts is None or any(self.counts[self.head : self.head + count + (self.head == 0)]):
            return None
        tokens, counts = list(self.tokens), list(self.counts)
        del tokens[self.head : self.head + count], counts[self.head : self.head + count]
        return Document(tokens, counts, self.head)

    def from_token(self, start: int, end: int | None = None) -> Document:
        return Document(self.tokens[start:end], None if self.counts is None else self.counts[start:end])


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of documents on their way into rows.

    Args:
        tokens, counted: of what is in rows, and of these in the loss.
        longer: than a row.
        left_out: of these.
        silent: without a counted token, or parts of longer ones without any; left out too.
    """

    documents: int
    tokens: int
    counted: int
    longer: int = 0
    left_out: int = 0
    silent: int = 0

    def __add__(self, other: Fate) -> Fate:
        return Fate(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))


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


def joined(parts: Sequence[Rows]) -> Rows:
    """Rows of equal length, one part after the other."""
    tokens, labels, segments = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("tokens", "labels", "segments")
    )
    return Rows(tokens, labels, segments, [length for part in parts for length in part.lengths])


def pack(documents: Sequence[Document], length: int, *, alone: bool = False) -> Rows:
    """Pack documents into rows, the longest first, each into the fullest row that has room for it.

    A longer document continues in a row that repeats the last token of the piece before, so that every token after the first is
    predicted once.

    Args:
        alone: each document, or part of one, has a row of its own.

    >>> rows = pack([Document([5, 6, 7]), Document([8, 9]), Document([1, 2, 3, 4], [False, False, True, True])], 5)
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
            labels[row, at : end - 1] = np.where(
                piece.counts[1:] if piece.counts else True, tokens[row, at + 1 : end], IGNORED
            )
            at = end
        segments[row, at:] = len(members)
        lengths.append(at)
    return Rows(torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(segments), lengths)


def fitted(documents: Iterable[Document], length: int, too_long: TooLong) -> tuple[list[Document], Fate]:
    """Documents of at most `length` tokens, some of which count, and what became of the others."""
    fitting: list[Document] = []
    count = longer = left_out = silent = 0
    for document in documents:
        count += 1
        pieces = [document]
        if (over := len(document.tokens) - length) > 0:
            longer += 1
            if too_long == "split":
                pieces = list(_pieces(document, length))
            elif too_long == "cut_prompt" and (cut := document.without_prompt(over)) is not None:
                pieces = [cut]
            else:
                left_out += 1
                continue
        teaching = [piece for piece in pieces if piece.counted]
        silent += len(pieces) - len(teaching)
        fitting += teaching
    counted = sum(piece.counted for piece in fitting)
    return fitting, Fate(
        count, sum(len(piece.tokens) for piece in fitting), counted, longer, left_out, silent
    )


def _pieces(document: Document, length: int) -> Iterator[Document]:
    for start in range(0, max(len(document.tokens) - 1, 1), length - 1):
        yield document.from_token(start, start + length)


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
