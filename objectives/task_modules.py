"""A package without files, in which every folder of this machine is a package: the home of task files.

A file is a module `bsearch.objectives.task_modules.FOLDER.STEM`, with its folder spelled in the name. So its functions and
classes can be unpickled by processes of the user's own (loaders, pools); files with the same name in
different folders are different modules; and relative imports reach the files beside it.
"""

from __future__ import annotations

import base64
import os
import sys
import sysconfig
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

__path__: list[str] = []  # this module is a package


def module_name(path: Path) -> str:
    """The name of a file's module.

    Args:
        path: absolute.
    """
    stem = path.stem if path.stem.isidentifier() else f"_{_spelled(path.stem)}"
    return f"{__name__}.{_spelled(str(path.parent))}.{stem}"


class _Uncached(SourceFileLoader):
    """Compiles the file as it is now: cached bytecode of the same second and length could be of an older text."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        spelled, _, stem = fullname.removeprefix(f"{__name__}.").partition(".")
        if (folder := _read(spelled)) is None:
            return None
        if not stem:
            package = ModuleSpec(fullname, None, is_package=True)
            package.submodule_search_locations = [folder]
            return package
        file = Path(folder, f"{stem}.py")
        if not file.is_file() and stem.startswith("_") and (read := _read(stem[1:])):
            file = Path(folder, f"{read}.py")
        if "." in stem or not file.is_file():
            return None  # a folder beside it, or a module of one: found as any other
        return spec_from_file_location(fullname, file, loader=_Uncached(fullname, str(file)))


def _spelled(text: str) -> str:
    """Any text in letters and digits.

    >>> _read(_spelled("/home/ann/it's 50%"))
    "/home/ann/it's 50%"
    """
    return "x" + base64.b32encode(os.fsencode(text)).decode().rstrip("=").lower()


def _read(spelled: str) -> str | None:
    letters = spelled.removeprefix("x").upper()
    try:
        return os.fsdecode(base64.b32decode(letters + "=" * (-len(letters) % 8)))
    except ValueError:
        return None


sys.meta_path.append(_Finder())


_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def is_users(file: str, module: str) -> bool:
    """Whether code of this file and module is the user's.

    >>> is_users("/home/ann/tasks.py", "tasks"), is_users("<frozen importlib._bootstrap>", "importlib._bootstrap")
    (True, False)
    """
    ours = module.partition(".")[0] == __name__.partition(".")[0] and not module.startswith(f"{__name__}.")
    return not (ours or file.startswith(("<", *_LIBRARIES)) or "site-packages" in file)
