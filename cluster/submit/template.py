"""Templates of what is sent to a cluster: the user's text, kept as it is, with placeholders such as `{{ nodes }}` filled in."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ...spaces.boundary.files import text_of
from ...spaces.errors import Fault, StudyFileError, near_miss

OURS = Path(__file__).parent / "templates"
LARGEST = 1 << 20  # bytes
_PLACEHOLDER = re.compile(r"\{\{ *([A-Za-z_]\w*) *\}\}")


@dataclass(frozen=True, slots=True)
class Template:
    """The text of a template, and its file."""

    path: Path
    text: str

    @classmethod
    def of(cls, written: str | None, folder: Path, usual: str) -> Template:
        """The template that a study file names, relative to its folder, or the `usual` one of ours.

        Raises:
            StudyFileError: it cannot be read.
        """
        path = OURS / usual if written is None else folder / Path(written).expanduser()
        return cls(path, text_of(path, "a template for submit.template", LARGEST))

    @property
    def notes(self) -> tuple[str, ...]:
        """Where the template is, if it is one of ours, so that it can be copied."""
        usual = self.path.parent == OURS
        return (
            f"to change the template, copy {self.path} beside the study file and name it in submit.template",
        ) * usual

    def fault(self, message: str, line: int | None = None) -> Fault:
        return Fault("", message, str(self.path), line)

    def filled(self, values: Mapping[str, object], required: Sequence[str] = ()) -> str:
        """The text with its placeholders filled in.

        Raises:
            StudyFileError: an unknown placeholder, or a required one that is missing.

        >>> Template(Path("job.sh"), "--nodes={{ nodes }}").filled({"nodes": 2})
        '--nodes=2'
        """
        found = [
            (name, line)
            for line, text in enumerate(self.text.splitlines(), 1)
            for name in _PLACEHOLDER.findall(text)
        ]
        known = ", ".join(f"{{{{ {name} }}}}" for name in values)
        faults = [
            self.fault(
                f"expected placeholders among {known}; got {{{{ {name} }}}}.{near_miss(name, values)}", line
            )
            for name, line in found
            if name not in values
        ]
        used = {name for name, _ in found}
        faults += [
            self.fault(f"expected {{{{ {name} }}}} in the template, got none")
            for name in required
            if name not in used
        ]
        if faults:
            raise StudyFileError(faults)
        return _PLACEHOLDER.sub(lambda match: str(values[match[1]]), self.text)

    def mapping(self, values: Mapping[str, object], required: Sequence[str] = ()) -> dict[str, Any]:
        """The filled text as YAML with one mapping.

        Raises:
            StudyFileError: as `filled`, or it is not that.
        """
        try:
            content = yaml.safe_load(self.filled(values, required))
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            problem = getattr(error, "problem", None) or type(error).__name__
            message = f"invalid YAML, once its placeholders are filled in: {problem}"
            raise StudyFileError(self.fault(message, mark.line + 1 if mark else None)) from None
        if not isinstance(content, dict):
            raise StudyFileError(
                self.fault(f"expected one mapping of keys to values, got {type(content).__name__}")
            )
        return content
