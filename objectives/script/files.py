"""Where a script's files go: what it writes below its folder is kept apart, so that trials leave the user's files alone."""

from __future__ import annotations

import builtins
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch


@contextmanager
def files_apart(folder: Path, apart: Path, applies: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Context in which files that this thread writes below `folder` are written below `apart`, and read from there again.

    Args:
        applies: whether it is the script that writes, and not what gives it its batches.
    """
    thread, folder = threading.get_ident(), folder.resolve()
    stack = ExitStack()

    def moved(file: Any, *, writes: bool) -> Any:
        if not isinstance(file, str | os.PathLike) or threading.get_ident() != thread or not applies():
            return file
        path = Path(os.path.abspath(os.fspath(file)))  # noqa: PTH100  # links are followed where they lead
        if not path.is_relative_to(folder):
            return file
        there = apart / path.relative_to(folder)
        if writes:
            make_folders(there.parent, exist_ok=True)
        return str(there) if writes or there.exists() else file

    make_folders = os.makedirs

    def replaced(owner: Any, name: str, place: int, writes: Callable[..., bool]) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def ours(*arguments: Any, **named: Any) -> Any:
            if len(arguments) > place:
                file = moved(arguments[place], writes=writes(*arguments, **named))
                arguments = (*arguments[:place], file, *arguments[place + 1 :])
            return original(*arguments, **named)

        setattr(owner, name, ours)
        stack.callback(setattr, owner, name, original)

    with stack:
        for owner in (builtins, io):
            replaced(owner, "open", 0, lambda file, mode="r", *_, **__: any(letter in mode for letter in "wax+"))
        replaced(torch, "save", 1, lambda *_, **__: True)
        replaced(torch, "load", 0, lambda *_, **__: False)
        replaced(os, "mkdir", 0, lambda path, *_, **__: not os.path.lexists(path))
        yield
