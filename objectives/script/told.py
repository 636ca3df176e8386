"""How a script is told what a trial sets, and how it is run so."""

from __future__ import annotations

import ast
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

import yaml

from ...spaces.errors import TaskError
from .files import FilesApart
from .takeover import take_over_accelerate
from .trackers import imports, stand_ins

Number = int | float
# Settings that a script reads: files up to so many bytes.
SETTINGS, _MOST_BYTES = (".yaml", ".yml", ".json"), 1 << 18


@dataclass(frozen=True, slots=True)
class Told:
    """How a script is told what a trial sets: by a name each.

    `--lr` is a flag, `lr=` a key as Hydra has them, `LR` a name that the script assigns a number to, `lr=0.1` and
    `epoch in range(10)` what stands in its text, and `config.yaml:train.lr` an entry of a file that it reads.
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
    >>> [kind_of(name) for name in ("--lr", "lr=", "LR", "lr=0.1", "epoch in range(10)", "config.yaml:train.lr")]
    ['flag', 'key', 'name', 'text', 'text', 'file']
    """
    if name.startswith("-"):
        return "flag"
    if name.endswith("="):
        return "key"
    return "name" if name.isidentifier() else "file" if ":" in name else "text"


def flags_of(values: Mapping[str, Number]) -> list[str]:
    """The arguments of a command line that tell these."""
    flags = [f"{name}={value}" for name, value in values.items() if kind_of(name) == "flag"]
    return [*flags, *(f"{name}{value}" for name, value in values.items() if kind_of(name) == "key")]


def numbers_in(tree: ast.AST) -> Iterator[tuple[str, ast.Constant, Number]]:
    """Numbers in a script's text, outermost first: how each is named, where it stands, and what is to be added to it."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets, value=ast.Constant() as value):
                yield from ((target.id, value, 0) for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant() as value):
                yield name, value, 0
            case ast.keyword(arg=str(name), value=ast.Constant() as value):
                yield f"{name}={ast.unparse(value)}", value, 0
            case ast.arguments():
                names = [one.arg for one in (*node.posonlyargs, *node.args)]
                given = [*zip(names[len(names) - len(node.defaults) :], node.defaults, strict=True)]
                given += [(one.arg, value) for one, value in zip(node.kwonlyargs, node.kw_defaults, strict=True) if value]
                for name, default in given:
                    if isinstance(default, ast.Constant):
                        yield f"{name}={ast.unparse(default)}", default, 0
            case ast.For(target=ast.Name(id=name), iter=ast.Call(func=ast.Name(id="range"), args=[*bounds])):
                if bounds and len(bounds) < 3 and all(isinstance(one, ast.Constant) for one in bounds):
                    first = bounds[0].value if len(bounds) == 2 else 0  # type: ignore[attr-defined]
                    yield f"{name} in {ast.unparse(node.iter)}", bounds[-1], first  # type: ignore[misc]


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def entries(settings: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """The entries of nested settings, with dots between their names."""
    pairs = settings.items() if isinstance(settings, dict) else enumerate(settings) if isinstance(settings, list) else ()
    for name, value in pairs:
        yield f"{before}{name}", value
        yield from entries(value, f"{before}{name}.")


def settings_in(path: Path) -> Any:
    """What a file of settings holds; None where it is none."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8")) if path.stat().st_size <= _MOST_BYTES else None
    except (OSError, ValueError, yaml.YAMLError):
        return None


@contextmanager
def as_main(
    path: Path, arguments: Sequence[str], values: Mapping[str, Number], folder: Path, files: FilesApart
) -> Iterator[None]:
    """Run a script as `__main__` with these arguments and values, in a folder; modules beside it are unloaded afterwards.

    Raises:
        TaskError: it does not have what it is to be told by.
    """
    tree = ast.parse(path.read_bytes(), str(path))
    in_text = {name: value for name, value in values.items() if kind_of(name) in ("name", "text")}
    in_files = {name: value for name, value in values.items() if kind_of(name) == "file"}
    if left := _written_into(tree, in_text) | _written_into_files(in_files, folder, files):
        raise TaskError(f"{path.name}: expected a number at {', '.join(left)}, in its text or the file; there is none")
    if imports(path, "accelerate"):
        take_over_accelerate()
    module, stood = ModuleType("__main__"), stand_ins(path)
    module.__file__, modules = str(path), dict(sys.modules)
    before, came_from = (sys.argv, sys.path[:]), Path.cwd()
    handlers, level = logging.root.handlers, logging.root.level
    sys.argv = [str(path), *arguments, *flags_of(values)]
    sys.modules |= {**stood, "__main__": module}
    sys.path.insert(0, str(path.parent))
    logging.root.handlers = []  # as a script finds it, whose `basicConfig` does nothing where there are some
    logging.root.setLevel(logging.WARNING)
    try:
        os.chdir(folder)
        exec(compile(tree, str(path), "exec", dont_inherit=True), module.__dict__)  # noqa: S102  # the user's own script
        yield
    finally:
        os.chdir(came_from)
        sys.argv, sys.path[:] = before
        logging.root.handlers = handlers
        logging.root.setLevel(level)
        for name, imported in list(sys.modules.items()):
            file = getattr(imported, "__file__", None)
            if name not in modules and file and Path(file).is_relative_to(path.parent) and "site-packages" not in file:
                del sys.modules[name]
        for name in (*stood, "__main__"):
            sys.modules.pop(name, None)
            sys.modules.update({name: modules[name]} if name in modules else {})
        module.__dict__.clear()


def _written_into(tree: ast.Module, values: Mapping[str, Number]) -> dict[str, Number]:
    """Set numbers in a script's text: of a name, where it is first assigned; of what stands there, everywhere.

    Returns those that do not stand there.
    """
    wanted, found = {_as_unparsed(name): name for name in values}, set[str]()
    for name, place, offset in list(numbers_in(tree)):
        if (told := wanted.get(name)) is not None and not (name.isidentifier() and told in found) and is_number(place.value):
            place.value = values[told] + offset
            found.add(told)
    return {name: value for name, value in values.items() if name not in found}


def _as_unparsed(name: str) -> str:
    """`lr=1e-3` as it would be read: `lr=0.001`."""
    before, equals, value = name.partition("=")
    try:
        return f"{before}={ast.unparse(ast.parse(value, mode='eval'))}" if equals and ":" not in before else name
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
        if not isinstance(inner, dict) or not is_number(inner.get(last)):
            continue
        inner[last] = value
        text = json.dumps(settings) if place.suffix == ".json" else yaml.safe_dump(settings, sort_keys=False)
        Path(files.place_of(str(folder / file), writes=True)).write_text(text, encoding="utf-8")
        del left[name]
    return left
