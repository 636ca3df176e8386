"""The metric in what a script writes: the number after a text."""

from __future__ import annotations

import re

from ...spaces.errors import TaskError

# A number with all that may belong to it: what `0,940`, `1.2k` or `1_000` mean is not guessed.
_WORD = r"\.?\d(?:\w|[.,'](?=\d)|(?<=[eE])[-+])*"
_NUMBER = rf"['\"]?(?:\s*\(%\))?\s*[:=(]?\s*([-+]?(?:{_WORD}|(?:nan|inf)\b))(?:\s*/\s*({_WORD}))?\s*(%?)"


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
    """The number that was found, as a share where it is one of so many or in percent.

    Raises:
        TaskError: it is not a plain number.

    >>> [value_of(metric_pattern("acc").search(text)) for text in ("acc: 9/10 (90%)", "acc 12.5 %", "acc=3e-1")]
    [0.9, 0.125, 0.3]
    """
    value, of, percent = found.groups()[-3:]
    try:
        number, whole = (float(one.replace("_", " ")) for one in (value, of or "1"))
    except ValueError:
        raise TaskError(
            f"metric: expected a plain number such as 0.94, 94 % or 940/1000, got {found[0].strip()!r} in "
            f"{found.string.strip()!r}. Let the script write it so: a point before decimals, no separators and no unit"
        ) from None
    if of and of.isdigit() and whole:
        return number / whole
    return number / 100 if percent and not of else number


class Output:
    r"""What a script writes, as lines that a terminal would show; what it writes within a pass is of its training data.

    >>> output = Output()
    >>> output.ended("10% acc=0.1\r20% acc=0.2", in_pass=True), output.ended("\r99% acc=0.3\nval acc 0.9\n", in_pass=False)
    ([], ['', 'val acc 0.9'])
    """

    def __init__(self) -> None:
        # The line that has not ended, and how much of it was written within a pass.
        self._line, self._of_pass = (
            "",
            0,
        )

    def ended(self, text: str, *, in_pass: bool) -> list[str]:
        """The lines that this text ends, without what was written within a pass."""
        first, *others = text.split("\n")
        lines: list[str] = []
        self._line += first
        for line in others:
            after = self._line[self._of_pass :]
            # A progress bar that was begun within a pass is drawn anew afterwards.
            shown = after.partition("\r")[0] if self._of_pass else after.rstrip("\r").rpartition("\r")[2]
            lines.append("" if in_pass else shown)
            self._line, self._of_pass = line, 0
        if in_pass:
            self._of_pass = len(self._line)
        return lines
