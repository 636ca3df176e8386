"""The metric in what a script writes: the number after a text."""

from __future__ import annotations

import re

from ...spaces.errors import TaskError

_NUMBER = (
    r"['\"]?(?:\s*\(%\))?\s*[:=(]?\s*([-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf)"
    r"(?:\s*/\s*(\d+))?\s*(%?)"
)


def metric_pattern(text: str) -> re.Pattern[str]:
    """A number after a text, such as `Accuracy: 9850/10000 (98%)`, `acc = 98.5 %` or `val_loss 0.12`.

    Args:
        text: a regular expression.

    Raises:
        TaskError: it is none.
    """
    try:
        return re.compile(f"(?:{text}){_NUMBER}")
    except re.error as error:
        raise TaskError(f"metric: expected a regular expression, got {text!r}: {error}") from None


def value_of(found: re.Match[str]) -> float:
    """
    >>> [value_of(metric_pattern("acc").search(text)) for text in ("acc: 9/10 (90%)", "acc 12.5 %", "acc=3e-1")]
    [0.9, 0.125, 0.3]
    """
    value, of, percent = found.groups()[-3:]
    value = value.replace(",", "")
    return float(value) / float(of) if of and float(of) else float(value) / 100 if percent else float(value)


def as_shown(line: str) -> str:
    r"""A line as a terminal shows it: what follows the last return to its beginning, as progress bars have them.

    >>> as_shown("10% acc=0.1\r100% acc=0.9")
    '100% acc=0.9'
    """
    return line.rpartition("\r")[2]
