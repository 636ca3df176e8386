"""Reading study files: all faults at once, each with its line, its key, what was expected and what was found."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, get_args

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ..boundary.files import text_of
from ..boundary.given import scalar_of, shown
from ..boundary.storage import is_url, sqlite_parts, sqlite_url
from ..domain import DOMAIN_KINDS, Domain, Section, applies, values_of
from ..errors import MOST_FAULTS, Fault, StudyFileError, TaskError, cut, near_miss
from ..learning_rate import RULE_EXPONENTS
from ..names import NAMES, REACHED, direction_of
from ..record import RESULTS, SEARCHED_FACTS, TrialFacts
from .devices import Devices
from .space import Space
from .spec import StudySpec
from .training import CODE

Key = tuple[str | int, ...]

# A task parameter of one of these names would take the place of a result.
RESERVED = frozenset(RESULTS | set(TrialFacts.__slots__) - SEARCHED_FACTS)
# Limits far above any real study file: larger input is a mistake or an attack.
LARGEST_FILE = 1 << 20  # bytes
MOST_NODES = 10_000  # keys and values
DEEPEST = 32  # levels of nesting


class _Loader(yaml.SafeLoader):
    """Plain YAML 1.2 values: `1e-3` is a number, and custom tags are rejected, as is `no` without quotes: text in YAML 1.2,
    false in 1.1. Size and depth are limited.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._left = MOST_NODES
        self._open: list[str | None] = []  # anchors of the nodes being composed, outermost first

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        alias = isinstance(event, yaml.AliasEvent)
        if alias and event.anchor in self._open:
            raise _rejected(
                f"expected no recursive alias, got {event.anchor!r} inside itself", event.start_mark
            )
        self._open.append(None if alias else event.anchor)
        self._left -= 1
        if self._left < 0:
            raise _rejected(f"expected at most {MOST_NODES} keys and values", event.start_mark)
        if len(self._open) > DEEPEST:
            raise _rejected(f"expected at most {DEEPEST} levels of nesting", event.start_mark)
        node = super().compose_node(parent, index)
        self._open.pop()
        return node


class _RejectedError(yaml.MarkedYAMLError):
    """Valid YAML that a study file may not contain."""


def _rejected(message: str, mark: yaml.Mark) -> _RejectedError:
    return _RejectedError(problem=message, problem_mark=mark)


def _constructor(
    parse: Callable[[str], Any], expected: str
) -> Callable[[yaml.SafeLoader, yaml.ScalarNode], Any]:
    """A constructor that reports invalid values with their line."""

    def construct(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
        try:
            return parse(str(loader.construct_scalar(node)))
        except (ValueError, KeyError):
            raise _rejected(f"expected {expected}, got {cut(node.value, 60)!r}", node.start_mark) from None

    return construct


# Words that YAML 1.1 reads as true or false, and 1.2 as text, in which every one of them is true to Python.
_UNCLEAR = re.compile(r"yes|no|on|off", re.IGNORECASE)


def _int(text: str) -> int:
    if not -(1 << 63) <= (value := int(text)) < 1 << 63:  # the range of databases and tensors
        raise ValueError(text)
    return value


def _float(text: str) -> float:
    return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))


def _unknown_tag(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    raise _rejected(f"expected plain values, got the tag {node.tag!r}", node.start_mark)


_TAG = "tag:yaml.org,2002:"
_Loader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers if tag in (_TAG + "null", _TAG + "merge")]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    _TAG + "bool", re.compile(r"(?:true|false|True|False|TRUE|FALSE)$"), list("tfTF")
)
_Loader.add_implicit_resolver(_TAG + "int", re.compile(r"[-+]?[0-9]+$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    _TAG + "float",
    re.compile(
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
    ),
    list("-+.0123456789"),
)
_Loader.yaml_constructors = {
    _TAG + kind: yaml.SafeLoader.yaml_constructors[_TAG + kind] for kind in ("null", "str", "seq", "map")
}
_Loader.add_constructor(
    _TAG + "bool", _constructor(lambda text: {"true": True, "false": False}[text.lower()], "true or false")
)
_Loader.add_constructor(_TAG + "int", _constructor(_int, "a 64-bit integer"))
_Loader.add_constructor(_TAG + "float", _constructor(_float, "a number"))
_Loader.add_constructor(None, _unknown_tag)


def read_study(path: Path, *, storage: str | None = None) -> StudySpec:
    """Read and check a study file; relative paths in it are resolved against its folder.

    Args:
        storage: overrides the file's `storage`, as `BSEARCH_STORAGE` does.

    Raises:
        StudyFileError: all faults of the file.
    """
    if re.fullmatch(CODE, str(path)) and not os.path.lexists(path):
        message = "expected a study file, got a task. `bsearch run` takes one with --batch and --rate"
        raise StudyFileError(
            Fault("", f"{message}; for a study file, edit the one that `bsearch init` writes", str(path))
        )
    text = text_of(path, "a study file", LARGEST_FILE)
    return resolve_study(parse_study(text, file=str(path)), path.parent.resolve(), storage)


def located(error: StudyFileError, path: Path) -> StudyFileError:
    """The error with file and line added to its faults, for those found after the file was read."""
    try:
        node = _Loader(text_of(path, "a study file", LARGEST_FILE)).get_single_node()
    except (StudyFileError, yaml.YAMLError):
        node = None
    if node is None:  # the file has changed since it was read
        return error
    faults = [
        fault
        if fault.file or not fault.key
        else replace(fault, file=str(path), line=_line(node, tuple(fault.key.split("."))))
        for fault in error.faults
    ]
    return StudyFileError(faults)


def resolve_study(study: StudySpec, folder: Path, storage: str | None = None) -> StudySpec:
    """The study with the paths of its task, storage and checkpoints made absolute, relative to `folder`."""
    reference, _, name = study.task.rpartition(":")
    if reference.endswith(".py"):
        reference = _absolute("task", reference, folder)
    else:
        reference = _module_beside(folder, reference) or reference
    storage = storage or study.storage or sqlite_url(f"{study.study}.db")
    if (parts := sqlite_parts(storage)) is not None:
        path, *rest = parts
        storage = sqlite_url(_absolute("storage", path, folder), *rest)
    cluster, checkpoints = study.cluster, study.cluster.checkpoints
    if checkpoints is not None and not is_url(checkpoints):
        cluster = cluster.model_copy(
            update={"checkpoints": _absolute("cluster.checkpoints", checkpoints, folder)}
        )
    resolved = study.model_copy(
        update={"task": f"{reference}:{name}", "storage": storage, "cluster": cluster}
    )
    resolved._folder = folder
    return resolved


def _module_beside(folder: Path, name: str) -> str | None:
    """The file of a module beside the study file, which comes before installed ones as it does for a script."""
    place = folder.joinpath(*name.split("."))
    files = (place / "__init__.py", place.with_name(f"{place.name}.py"))
    return next((str(file.resolve()) for file in files if file.is_file()), None)


def _absolute(key: str, path: str, folder: Path) -> str:
    try:
        return str((folder / Path(path).expanduser()).resolve())
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # too long, a loop of links, an unknown home, or a NUL
        raise StudyFileError(Fault(key, f"expected a path, got {cut(path, 200)!r}: {error}")) from None


def parse_study(text: str, file: str = "study.yaml") -> StudySpec:
    """Parse and check the text of a study file. Paths stay as written.

    Raises:
        StudyFileError: all faults, in file order.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        duplicates = list(_duplicates(node))
        data = loader.construct_document(node) if node is not None else None
    except (yaml.YAMLError, ValueError) as error:
        raise StudyFileError(_yaml_fault(error, file)) from None
    if not isinstance(node, yaml.MappingNode) or not isinstance(data, dict):
        found = (
            "an empty file"
            if node is None
            else "a list"
            if isinstance(node, yaml.SequenceNode)
            else "a single value"
        )
        raise StudyFileError(Fault("", f"expected keys such as study, task and space; got {found}", file, 1))
    faults = [
        Fault(_dotted(key), f"duplicate key, first on line {first}", file, line)
        for key, line, first in duplicates
    ]
    unclear = {
        _dotted(key): Fault(_dotted(key), message, file, line) for key, message, line in _unclear(node)
    }
    try:
        study = StudySpec.model_validate(data)
    except ValidationError as error:
        invalid = [_fault(details, node, file) for details in error.errors()[: MOST_FAULTS + 1]]
        faults += [fault for fault in invalid if fault.key not in unclear]
        study = None
    faults += unclear.values()
    faults += [
        Fault(_dotted(key), message, file, _line(node, key))
        for key, message in islice(_cross_faults(data), MOST_FAULTS)
    ]
    if faults or study is None:
        raise StudyFileError(sorted(faults, key=lambda fault: fault.line or 0))
    return study


def study_from_dict(data: Mapping[str, Any]) -> StudySpec:
    """Check a study that is not from a file, such as one built from command-line options.

    Raises:
        StudyFileError: all faults, without file and lines.
    """
    try:
        return parse_study(json.dumps(_plain_data(data)))
    except StudyFileError as error:
        raise StudyFileError(replace(fault, file=None, line=None) for fault in error.faults) from None


def _plain_data(value: Any, key: Key = ()) -> Any:
    """What Python gave for a study as YAML has it: NumPy's numbers as Python's.

    Raises:
        StudyFileError: a value that YAML has no word for, or that a study cannot hold.
    """
    if isinstance(value, Mapping):
        return {str(name): _plain_data(part, (*key, str(name))) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_data(part, (*key, place)) for place, part in enumerate(value)]
    if value is None or isinstance(value, PurePath):
        return value if value is None else str(value)
    try:
        plain = scalar_of("", value)
    except TaskError:
        message = f"expected a number, text, true, false, null, a list or a mapping, got {shown(value)}"
        raise StudyFileError(Fault(_dotted(key), message)) from None
    if isinstance(plain, float) and not math.isfinite(plain):
        raise StudyFileError(Fault(_dotted(key), f"expected a finite number, got {plain}"))
    return plain


def changed_study(study: StudySpec, changes: Mapping[str, Any]) -> StudySpec:
    """The study with some of its keys replaced; other keys of a section are unchanged.

    Raises:
        StudyFileError: all faults, without lines.
    """
    if not changes:
        return study
    data = study.model_dump(mode="json", exclude_unset=True)  # what is not written may depend on what is
    for key, value in changes.items():
        old = data.get(key)
        data[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, Mapping) else value
    return resolve_study(study_from_dict(data), study.folder, study.storage)


def plain_value(text: str, where: str) -> Any:
    """Parse one value as in a study file.

    Args:
        where: source of the text, for messages.

    Raises:
        StudyFileError: not plain YAML.

    >>> plain_value("[1e-3, 'no']", "--set rates")
    [0.001, 'no']
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if unclear := next((message for _, message, _ in _unclear(node)), ""):
            raise StudyFileError(f"{where}: {unclear}")
        return loader.construct_document(node)
    except (yaml.YAMLError, ValueError) as error:
        raise StudyFileError(_yaml_fault(error, where)) from None


def _yaml_fault(error: Exception, file: str) -> Fault:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or str(error).partition("\n")[0] or type(error).__name__
    message = (
        problem if isinstance(error, _RejectedError) else f"invalid YAML: {problem.removeprefix('but ')}"
    )
    return Fault("", message, file, mark.line + 1 if mark else None)


def _dotted(key: Key) -> str:
    """`("baseline", 0, "epochs")` as `baseline[0].epochs`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key).removeprefix(".")


def _duplicates(node: yaml.Node | None, key: Key = ()) -> Iterator[tuple[Key, int, int]]:
    """Keys that occur twice in one mapping: (key, line, first line). YAML would silently use the last."""
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for name, value in node.value:
            if not isinstance(name, yaml.ScalarNode):
                continue
            line = name.start_mark.line + 1
            if name.value in seen:
                yield (*key, name.value), line, seen[name.value]
            seen[name.value] = line
            yield from _duplicates(value, (*key, name.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _duplicates(value, (*key, index))


def _unclear(node: yaml.Node, key: Key = ()) -> Iterator[tuple[Key, str, int]]:
    """Values that YAML 1.1 reads as true or false, and 1.2 as text: (key, message, line)."""
    inner: list[tuple[Any, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        inner = [(name.value, value) for name, value in node.value if isinstance(name, yaml.ScalarNode)]
    elif isinstance(node, yaml.SequenceNode):
        inner = list(enumerate(node.value))
    elif (
        isinstance(node, yaml.ScalarNode)
        and node.style is None
        and node.tag == "tag:yaml.org,2002:str"
        and _UNCLEAR.fullmatch(node.value)
    ):
        message = f"expected true or false, or text in quotes, got {node.value}. Write true, false or '{node.value}'."
        yield key, message, node.start_mark.line + 1
    for name, value in inner:
        yield from _unclear(value, (*key, name))


def _step(node: yaml.Node, part: str | int) -> tuple[yaml.Node, int] | None:
    """The node under one part of a key, and its line."""
    if isinstance(node, yaml.MappingNode):
        for name, value in reversed(node.value):  # the last one applies, also over keys merged by `<<`
            if name.value == str(part):
                return value, name.start_mark.line + 1
    elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part].start_mark.line + 1
    return None


def _line(node: yaml.Node, key: Key) -> int:
    """The line of a key, or of its innermost part that is in the file."""
    line = node.start_mark.line + 1
    for part in key:
        found = _step(node, part)
        if found is None:
            break
        node, line = found
    return line


def _written(key: Key, node: yaml.Node) -> Key:
    """The key as the user wrote it, without pydantic's names for union members."""
    written: list[str | int] = []
    here: yaml.Node | None = node
    for part in key:
        found = _step(here, part) if here is not None else None
        if (
            found is None
            and isinstance(part, str)
            and (part in DOMAIN_KINDS or not part.isidentifier() or part in _SCALARS)
        ):
            continue
        if found is None and part in ("choices", "value") and not isinstance(here, yaml.MappingNode):
            continue
        if found is None and isinstance(part, int) and isinstance(here, yaml.MappingNode):
            continue
        written.append(part)
        here = found[0] if found else None
    return tuple(written)


_SCALARS = {"bool", "int", "float", "str"}

_EXPECTED = {
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
    "dict_type": "a mapping of keys to values",
    "tuple_type": "a list",
    "list_type": "a list",
    "too_short": "at least one value",
    "string_too_short": "a non-empty string",
}
_BOUNDS = {
    "greater_than_equal": (">=", "ge"),
    "greater_than": [">", "gt"],
    "less_than_equal": ("<=", "le"),
    "less_than": ["<", "lt"],
}


def _fault(details: ErrorDetails, node: yaml.Node, file: str) -> Fault:
    kind, context, value = details["type"], details.get("ctx", {}), details["input"]
    raw = details["loc"]
    key = _written(raw, node)
    if kind == "bsearch":
        message = context["message"]
        if ", got " not in message and "; got " not in message:
            message += f", got {value!r}"
    elif kind == "missing":
        message = "missing required key"
    elif kind == "extra_forbidden":
        known = _known_keys(raw)
        message = f"unknown key.{near_miss(key[-1], known)} Valid keys: {', '.join(known)}"
    elif kind == "literal_error":
        known = [word.strip("' ") for word in re.split(r",| or ", context["expected"])]
        message = f"expected {'one of ' if len(known) > 1 else ''}{', '.join(known)}; got {value!r}.{near_miss(value, known)}"
    elif kind in _BOUNDS:
        sign, name = _BOUNDS[kind]
        message = f"expected a number {sign} {context[name]}, got {value!r}"
    else:
        expected = _EXPECTED.get(kind, details["msg"].removeprefix("Input should be "))
        message = f"expected {expected}, got {value!r}"
    return Fault(_dotted(key), message, file, _line(node, key))


def _known_keys(key: Key) -> list[str]:
    """The valid keys of the section that contains an unknown key."""
    here: Any = StudySpec
    for part in key[:-1]:
        if isinstance(part, str) and part in DOMAIN_KINDS:
            here = DOMAIN_KINDS[part]
        elif isinstance(here, type) and issubclass(here, Section) and part in here.model_fields:
            here = _section_of(here.model_fields[str(part)].annotation)
    fields = getattr(here, "model_fields", None) or getattr(StudySpec, "model_fields", {})
    return list(fields)


def _section_of(annotation: Any) -> Any:
    """The section that an annotation such as `Annotated[Prior, ...] | None` allows; itself, if that is none."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(
        (found for part in get_args(annotation) if isinstance(found := _section_of(part), type)), annotation
    )


# A parameter of a task may be called much like a key of ours (completion, accumulation), but not as a typo of it would.
_TYPO = 0.75
# What others call our keys.
_OTHERS_WORDS = {
    name: key
    for key, meanings in {
        "effective_batch": ("effective_batch", "batch", "micro_batch"),
        "epochs": ("epochs",),
        "accumulation": ("accumulation",),
        "reference_rate": ("learning_rate",),
    }.items()
    for meaning in meanings
    for name in NAMES[meaning]
    if name not in REACHED
}


def _cross_faults(data: Mapping[str, Any]) -> Iterator[tuple[Key, str]]:
    """Faults of keys that are valid on their own but not in combination; studies of the storage may have them."""
    yield from _contradicting_direction(data)
    raw = data.get("space")
    if not isinstance(raw, dict):
        return
    # Never suggest `noise_batch`: tasks have parameters such as noise_std, and rules that require it say so.
    known = [name for name in Space.model_fields if name != "noise_batch"]
    for name in raw:
        if (ours := _OTHERS_WORDS.get(name, name)) not in raw:
            rate = "the rate at one batch, from which a rule scales it to others; for the rate itself, add rule: constant"
            yield (
                ("space", name),
                f"expected {ours}, {rate if ours == 'reference_rate' else 'as this is called here'}; got {name}",
            )
        elif name in RESERVED:
            yield ("space", name), f"{name!r} is reserved for bsearch's own results. Rename the parameter."
        elif name not in Space.model_fields and (
            miss := near_miss(name, [key for key in known if key not in raw], _TYPO)
        ):
            yield (
                ("space", name),
                f"{name!r} would be a parameter of the task, but it looks like a typo.{miss} "
                "If it is intended, choose a less similar name.",
            )
    try:
        space = Space.model_validate(raw)
    except ValidationError:
        return
    domains = space.domains()
    searched = [name for name, values in space.domains().items() if len({*values_of(values)}) > 1]
    with contextlib.suppress(ValidationError):
        devices = Devices.model_validate(data.get("devices") or {})
        domains["devices"] = devices.domain
        searched += ["devices"] if len(devices.counts) > 1 else []
    baseline = data.get("baseline")
    for index, settings in enumerate(baseline if isinstance(baseline, list) else []):
        for name, value in settings.items() if isinstance(settings, dict) else []:
            key: Key = ("baseline", index, str(name))
            if name not in domains:
                yield key, f"expected a parameter from space, got {name!r}.{near_miss(name, domains)}"
            elif not domains[name].contains(value):
                hint = (
                    f" Write rule: power, exponent: {RULE_EXPONENTS[value]!r}."
                    if _power_for(name, value, domains)
                    else ""
                )
                yield (
                    key,
                    f"expected {domains[name]} as in space.{name}, got {value!r}.{hint}".removesuffix(
                        "." * (not hint)
                    ),
                )
        if isinstance(settings, dict):
            chosen = {name: next(values_of(domain)) for name, domain in domains.items()} | settings
            missing = [
                name for name in searched if name not in settings and applies(domains[name].when, chosen)
            ]
            if missing:
                yield (
                    ("baseline", index),
                    f"expected a value for every searched parameter, got none for {', '.join(missing)}",
                )


def _contradicting_direction(data: Mapping[str, Any]) -> Iterator[tuple[Key, str]]:
    """A metric whose name does not say its direction, nor does the file; or a loss that would be maximized."""
    objectives = data.get("objectives")
    metric = objectives.get("metric") if isinstance(objectives, dict) else None
    name = metric.get("name") if isinstance(metric, dict) else metric
    if not isinstance(name, str) or not name:
        return
    said, written = direction_of(name), metric.get("direction") if isinstance(metric, dict) else None
    key: Key = ("objectives", "metric")
    if said is None and written is None:
        write = f"Write metric: {{name: {name}, direction: minimize}}, or maximize."
        yield (
            (*key, "direction"),
            f"expected minimize or maximize with {name!r}, which does not say it; got none. {write}",
        )
    elif said == "minimize" and written == "maximize":
        yield (
            key,
            f"expected direction: minimize with {name!r}, by its name; got maximize. If more of it is better, rename it.",
        )


def _power_for(name: str, value: Any, domains: Mapping[str, Domain]) -> bool:
    """Whether a setting names a rule that the space expresses as an exponent, as `rule: auto` does."""
    return (
        name == "rule"
        and value in RULE_EXPONENTS
        and "exponent" in domains
        and domains["rule"].contains("power")
    )
