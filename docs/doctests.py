"""Render docstring examples as code: mkdocstrings would render their `>>>` as block quotes."""

from __future__ import annotations

from typing import Any

from griffe import Extension, Object


class Doctests(Extension):
    """Fences every paragraph that starts with `>>>`."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None and ">>>" in obj.docstring.value:
            parts = obj.docstring.value.split("\n\n")
            obj.docstring.value = "\n\n".join(f"```pycon\n{part}\n```" if part.startswith(">>>") else part for part in parts)
