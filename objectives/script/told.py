"""How a script is told what a trial sets, and how it is run so."""

from __future__ import annotations

import ast
import json
import logging
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

import yaml

from ...spaces.domain import is_number
from ...spaces.errors import TaskError
from .files import FilesApart
from .trackers import trackers_replaced

Number = int | float
# Settings that a script reads: files up to so many bytes.
SETTINGS, _MOST_BYTES = (".yaml", ".yml", ".json"), 1 << 18


@dataclass(frozen=True, slots=True)
class Told:
    """How a script is told what a trial sets: by a name each.

    `--lr` is a flag, `lr=` a key as Hydra has them, `LR` a name that the script assigns a number to, `lr=0.1` and
    `epoch in range(10)` what stands in its text, `config.yaml:train.lr` an entry of a file that it reads, and `config.py:LR` a
    number in the text of a module that it imports.
    """

    batch: str
    rate: str
    epochs: str = ""
    steps: str = ""
    seed: str = ""


Kind = Literal["flag", "key", "name", "text", "file"]
# In the order in which they are preferred, where several tell the same.
KINDS: tuple[Kind, ...] = get_args(Kind)


def kind_of(name: str) -> Kind:
    """
    >>> [kind_of(name) for name in ("--lr", "lr=", "LR", "lr=0.1", "'lr': 0.1", "epoch in range(10)", "config.yaml:train.lr")]
    ['flag', 'key', 'name', 'text', 'text', 'text', 'file']
    """
    if name.startswith("-"):
        return "flag"
    if name.endswith("="):
        return "key"
    return "name" if name.isidentifier() else "file" if ":" in name and name[0] not in "'\"" else "text"


def flags_of(values: Mapping[str, Number]) -> list[str]:
    """The arguments of a command line that tell these."""
    flags = [f"{name}={value}" for name, value in values.items() if kind_of(name) == "flag"]
    return [*flags, *(f"{name}{value}" for name, value in values.items() if kind_of(name) == "key")]


def numbers_in(tree: ast.AST) -> Iterator[tuple[str, ast.Constant, Number]]:
    """Numbers in a script's text, outermost first: how each is named, where it stands, and what is to be added to it.

    The second of the same text is `lr=0.1 #2`; of a name, only where it is first assigned counts.
    """
    times = Counter[str]()
    for name, place, offset in _numbers_in(tree):
        times[name] += 1
        if times[name] == 1 or not name.isidentifier():
            yield name if times[name] == 1 else f"{name} #{times[name]}", place, offset


def _numbers_in(tree: ast.AST) -> Iterator[tuple[str, ast.Constant, Number]]:
    # A call goes before a default.
    for node in sorted(ast.walk(tree), key=lambda node: isinstance(node, ast.arguments)):
        match node:
            case ast.Assign(targets=targets, value=ast.Constant() as value):
                for target in targets:
                    yield (
                        ast.unparse(target) + f"={ast.unparse(value)}" * (not isinstance(target, ast.Name)),
                        value,
                        0,
                    )
            case ast.Call(func=ast.Name() | ast.Attribute() as function, args=[ast.Constant() as value]):
                if "seed" in ast.unparse(function):
                    yield ast.unparse(node), value, 0
            case ast.Dict(keys=keys, values=values):
                for key, entry in zip(keys, values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(entry, ast.Constant):
                        yield f"{ast.unparse(key)}: {ast.unparse(entry)}", entry, 0
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant() as value):
                yield name, value, 0
            case ast.keyword(arg=str(name), value=ast.Constant() as value):
                yield f"{name}={ast.unparse(value)}", value, 0
            case ast.arguments():
                names = [one.arg for one in (*node.posonlyargs, *node.args)]
                given = [*zip(names[len(names) - len(node.defaults) :], node.defaults, strict=True)]
                given += [
                    (one.arg, value)
                    for one, value in zip(node.kwonlyargs, node.kw_defaults, strict=True)
                    if value
                ]
                for name, default in given:
                    if isinstance(default, ast.Constant):
                        yield f"{name}={ast.unparse(default)}", default, 0
            case ast.For(target=ast.Name(id=name), iter=ast.Call(func=ast.Name(id="range"), args=[*bounds])):
                if bounds and len(bounds) < 3 and all(isinstance(one, ast.Constant) for one in bounds):
                    first = bounds[0].value if len(bounds) == 2 else 0  # type: ignore[attr-defined]
                    yield f"{name} in {ast.unparse(node.iter)}", bounds[-1], first  # type: ignore[misc]


def number_in(setting: object) -> Number | None:
    """The number that a setting is; YAML has `1e-3` as a text."""
    if isinstance(setting, str) and _EXPONENTIAL.fullmatch(setting):
        return float(setting)
    return setting if is_number(setting) else None  # type: ignore[return-value]


_EXPONENTIAL = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def entries(settings: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """The entries of nested settings, with dots between their names; of those whose names have none."""
    for name, value in settings.items() if isinstance(settings, dict) else ():
        if isinstance(name, str) and "." not in name:
            yield f"{before}{name}", value
            yield from entries(value, f"{before}{name}.")


def settings_in(path: Path) -> Any:
    """What a file of settings holds; None where it is none."""
    try:
        text = path.read_text(encoding="utf-8") if path.stat().st_size <= _MOST_BYTES else ""
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None


@contextmanager
def as_main(
    script: str, arguments: Sequence[str], values: Mapping[str, Number], folder: Path, files: FilesApart
) -> Iterator[None]:
    """Run a script as `__main__` with these arguments and values, in a folder; modules beside it are unloaded afterwards.

    Args:
        script: as in `script_file`.

    Raises:
        TaskError: it does not have what it is to be told by.
    """
    path, package = script_file(script, folder)
    tree = ast.parse(path.read_bytes(), str(path))
    in_text = {name: value for name, value in values.items() if kind_of(name) in ("name", "text")}
    in_files = {name: value for name, value in values.items() if kind_of(name) == "file"}
    in_modules = {name: in_files.pop(name) for name in [*in_files] if name.partition(":")[0].endswith(".py")}
    modules_changed = _ModulesChanged(in_modules, folder)
    left = _written_into(tree, in_text) | _written_into_files(in_files, folder, files) | modules_changed.left
    if left:
        raise TaskError(
            f"{path.name}: expected a number at {', '.join(left)}, in the script or the file; there is none"
        )
    root = path.parent if package is None else folder.resolve()
    own = partial(_lies_below, folders=(root, folder.resolve()))
    # Another run of it may be under way, while it is examined: each has modules of its own.
    for name in [name for name, one in list(sys.modules.items()) if own(one)]:
        if name.partition(".")[0] not in ("bsearch", "__main__"):
            del sys.modules[name]
    if (hydra := sys.modules.get("hydra.core.global_hydra")) is not None:
        hydra.GlobalHydra.instance().clear()
    module = ModuleType("__main__")
    module.__file__, module.__package__, modules = str(path), package, dict(sys.modules)
    before, came_from = (sys.argv, sys.path[:]), Path.cwd()
    sys.argv, sys.modules["__main__"] = [str(path), *arguments, *flags_of(values)], module
    sys.path.insert(0, str(root))
    try:
        os.chdir(folder)
        with trackers_replaced(), _loggers_of_its_own(), modules_changed:
            exec(compile(tree, str(path), "exec", dont_inherit=True), module.__dict__)  # noqa: S102  # the user's own script
        yield
    finally:
        os.chdir(came_from)
        sys.argv, sys.path[:] = before
        for name in [name for name, one in list(sys.modules.items()) if name not in modules and own(one)]:
            del sys.modules[name]
        sys.modules["__main__"] = modules["__main__"]
        module.__dict__.clear()


def script_file(script: str, folder: Path) -> tuple[Path, str | None]:
    """The file of a script, and the package that it is a module of.

    Args:
        script: `train.py`, or `-m package.train` for one that is run as a module; relative to a folder.
    """
    name = script.removeprefix("-m ")
    if name == script:
        return (folder / script).resolve(), None
    path = folder.resolve().joinpath(*name.split("."))
    if path.is_dir():
        return path / "__main__.py", name
    return path.with_suffix(".py"), name.rpartition(".")[0]


class _ModulesChanged:
    """Context in which modules that are imported have other numbers in their text; `left` do not stand there."""

    def __init__(self, values: Mapping[str, Number], folder: Path) -> None:
        self.left, self._trees = dict[str, Number](), dict[Path, ast.Module]()
        for file in {name.partition(":")[0] for name in values}:
            # All of a file at once: one that is changed already has another name.
            left = {
                name.removeprefix(f"{file}:"): value
                for name, value in values.items()
                if name.startswith(f"{file}:")
            }
            path = (folder / file).resolve()
            if path.is_file():
                self._trees[path] = ast.parse(path.read_bytes(), str(path))
                left = _written_into(self._trees[path], left)
            self.left |= {f"{file}:{name}": value for name, value in left.items()}

    def __enter__(self) -> None:
        if not _trees_of:
            SourceFileLoader.get_code = _code_of  # type: ignore[assignment, method-assign]
        _trees_of[threading.get_ident()] = self._trees

    def __exit__(self, *error: object) -> None:
        del _trees_of[threading.get_ident()]
        if not _trees_of:
            del SourceFileLoader.get_code  # it is inherited


# The modules with other numbers of each thread that runs a script.
_trees_of: dict[int, Mapping[Path, ast.Module]] = {}
_inherited = SourceFileLoader.get_code


def _code_of(loader: SourceFileLoader, fullname: str) -> Any:
    tree = _trees_of.get(threading.get_ident(), {}).get(Path(loader.path).resolve())
    return (
        _inherited(loader, fullname)
        if tree is None
        else compile(tree, loader.path, "exec", dont_inherit=True)
    )


def _lies_below(module: Any, folders: Sequence[Path]) -> bool:
    """Whether a module, or a package without a file, is one of these folders'."""
    known = getattr(module, "__dict__", {})  # some modules make up attributes
    places = [known.get("__file__") or "", *(known.get("__path__") or ())]
    return any(
        place and Path(place).is_relative_to(one)
        for place in places
        for one in folders
        if "site-packages" not in place
    )


@contextmanager
def _loggers_of_its_own() -> Iterator[None]:
    """Context in which the root logger has no handlers, so that `basicConfig` works; all loggers are as before afterwards."""

    def loggers() -> list[logging.Logger]:
        return [
            logging.root,
            *(one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)),
        ]

    kept, disabled = {one: (one.handlers, one.level) for one in loggers()}, logging.root.manager.disable
    logging.root.handlers = []
    logging.root.setLevel(logging.WARNING)
    for one in loggers():
        one.handlers = one.handlers[:]
    try:
        yield
    finally:
        for one in loggers():
            handlers, level = kept.get(one, ([], logging.NOTSET))
            for handler in [handler for handler in one.handlers if handler not in handlers]:
                handler.close()
            one.handlers = handlers
            one.setLevel(level)
        logging.disable(disabled)


def _written_into(tree: ast.Module, values: Mapping[str, Number]) -> dict[str, Number]:
    """Set numbers in a script's text; returns those that do not stand there."""
    wanted, found = {_as_unparsed(name): name for name in values}, set[str]()
    for name, place, offset in list(numbers_in(tree)):
        if (told := wanted.get(name)) is not None and is_number(place.value):
            place.value = values[told] + offset
            found.add(told)
    return {name: value for name, value in values.items() if name not in found}


def _as_unparsed(name: str) -> str:
    """`lr=1e-3` as it would be read: `lr=0.001`."""
    before, separator, value = name.partition(": " if name[0] in "'\"" else "=")
    value, number, place = value.partition(" #")
    try:
        return (
            f"{before}{separator}{ast.unparse(ast.parse(value, mode='eval'))}{number}{place}"
            if separator
            else name
        )
    except SyntaxError:
        return name


def _written_into_files(values: Mapping[str, Number], folder: Path, files: FilesApart) -> dict[str, Number]:
    """Set entries in copies of files of settings, which the script reads in their place; returns those that are not there."""
    left = dict(values)
    for name, value in values.items():
        file, _, entry = name.partition(":")
        *outer, last = entry.split(".")
        place = Path(files.place_of(str(folder / file), writes=False))
        inner = settings = settings_in(place) if entry else None
        for key in outer:
            inner = inner.get(key) if isinstance(inner, dict) else None
        if not isinstance(inner, dict) or number_in(inner.get(last)) is None:
            continue
        inner[last] = value
        text = json.dumps(settings) if place.suffix == ".json" else yaml.safe_dump(settings, sort_keys=False)
        Path(files.place_of(str(folder / file), writes=True)).write_text(text, encoding="utf-8")
        del left[name]
    return left
