"""Numbers that training code hands in, of whatever library's type."""

from __future__ import annotations

from contextlib import suppress
from decimal import Decimal
from numbers import Integral, Real
from typing import Any

from ..errors import TaskError, cut

_MOST_CHARACTERS = 60
# Scores beyond are as good as infinite: their squares and sums, which models take, overflow.
LARGEST = 1e100


def number_of(where: str, value: Any) -> int | float:
    """A number as Python's own, which JSON, databases and other processes can hold: an int or a float.

    Scalars of NumPy and torch, arrays of one element, decimals and fractions are numbers; true, false and text are not.

    Args:
        where: what the number is of, for the message.

    Raises:
        TaskError: it is no number, or larger than a double.

    >>> import numpy as np
    >>> number_of("score", np.float32(0.5)), number_of("score", np.int64(3))
    (0.5, 3)
    """
    if type(value) is int or type(value) is float:
        found: Any = value
    else:
        found = _item(value)
    if isinstance(found, bool) or not isinstance(found, Real | Decimal):
        raise TaskError(f"{where}: expected a number, got {shown(value)}")
    try:
        number = float(found)
    except OverflowError:
        raise TaskError(f"{where}: expected a number that fits a double, got {shown(value)}") from None
    return int(found) if isinstance(found, Integral) else number


def scalar_of(where: str, value: Any) -> bool | int | float | str:
    """A number, true, false or text as Python's own.

    Raises:
        TaskError: it is none of these.
    """
    found = _item(value)
    if isinstance(found, str):
        return cut(str(found))  # it is stored with each trial
    if isinstance(found, bool):
        return found
    if not isinstance(found, Real | Decimal):
        raise TaskError(f"{where}: expected a number, text, true or false, got {shown(value)}")
    return number_of(where, found)


def _item(value: Any) -> Any:
    """The Python scalar of an array or tensor of one element; anything else as it is."""
    if hasattr(value, "item") and not isinstance(value, type):
        with suppress(ValueError, RuntimeError, TypeError):
            return (value.detach() if hasattr(value, "detach") else value).item()
    return value


def shown(value: Any) -> str:
    """A value for messages, by its type where its text would say little or too much.

    >>> shown("0.5"), shown(None), shown({"a": 1})
    ("'0.5'", 'None', 'a dict')
    """
    if isinstance(value, str | bytes | bool | int | float | complex) or value is None:
        # Python refuses to write integers of thousands of digits.
        if isinstance(value, int) and value.bit_length() > 1000:
            return f"an integer of {value.bit_length()} bits"
        return cut(repr(value), _MOST_CHARACTERS)
    shape = f" of shape {tuple(value.shape)}" if isinstance(getattr(value, "shape", None), tuple) else ""
    return f"a {type(value).__name__}{shape}"
