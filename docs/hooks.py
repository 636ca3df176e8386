"""The reference pages, which are generated from the code, and MkDocs hooks.

The pages are checked in, so that they can be read without a build; a test compares them with the code. `python docs/hooks.py`
writes them anew.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from bsearch.cli import main
from bsearch.spaces.learning_rate import RATE_RULES, SCALINGS
from bsearch.spaces.study.spec import StudySpec

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))
from python_interface import python_interface  # noqa: E402  # MkDocs loads this file by its path


def rule_fact(rule: str, fact: str) -> str:
    """The line of a rule's docstring, or of a scaling's, that starts with `fact`, or its first line for "Summary"."""
    lines = [line.strip() for line in (({**RATE_RULES, **SCALINGS}[rule]).__doc__ or "").splitlines()]
    if fact == "Summary":
        return lines[0]
    return next(line.removeprefix(f"{fact}: ") for line in lines if line.startswith(f"{fact}: "))


Schema = Mapping[str, Any]
# Sections that describe one searched or fixed value; the pages call them domains.
DOMAINS = ("Range", "Choices", "Fixed")


def on_config(config: Any) -> Any:
    """Expand `decisions/*.md` in the nav to every page there, in order."""
    config.nav = _expanded(config.nav, Path(config.docs_dir))
    return config


def _expanded(item: Any, docs: Path) -> Any:
    if isinstance(item, list):
        return [_expanded(one, docs) for one in item]
    if isinstance(item, dict):
        return {name: _expanded(one, docs) for name, one in item.items()}
    return [path.relative_to(docs).as_posix() for path in sorted(docs.glob(item))] if "*" in item else item


def on_files(files: Any, config: Any) -> Any:
    """Add CHANGELOG.md, which is outside docs/ in the repository, to the pages."""
    from mkdocs.structure.files import File

    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "changelog.md", content=text.replace("](docs/", "](")))
    return files


def written_pages() -> Iterator[tuple[Path, str]]:
    """Each reference page, with what lies between its markers generated from the code."""
    generators = {
        "keys of study.yaml": study_keys,
        "learning-rate rules": rules,
        "commands": commands,
        "public interface": python_interface,
    }
    for path in sorted((ROOT / "docs" / "reference").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        for marker, generator in generators.items():
            begin, end = f"<!-- {marker} -->\n", f"<!-- end of {marker} -->"
            if begin in text:
                before, _, rest = text.partition(begin)
                text = (
                    before
                    + begin
                    + "\n"
                    + "\n".join(generator()).rstrip()
                    + "\n\n"
                    + end
                    + rest.partition(end)[2]
                )
        yield path, text


# ---------------------------------------------------------------- commands


def commands(command: click.Command = main, parent: click.Context | None = None) -> Iterator[str]:
    """Each command's help as the program prints it, followed by its subcommands."""
    settings = {**command.context_settings, "terminal_width": 92, "max_content_width": 92}
    context = click.Context(command, info_name=command.name, parent=parent, **settings)
    if parent is not None:
        name = context.command_path
        yield f"## {name}\n\n{inspect.cleandoc(command.help or '')}\n"
        formatter = context.make_formatter()
        command.format_usage(context, formatter)
        command.format_options(context, formatter)
        command.format_epilog(context, formatter)
        yield f"```text\n{formatter.getvalue().rstrip()}\n```\n"
    for name in sorted(getattr(command, "commands", {})):
        yield from commands(command.commands[name], context)  # type: ignore[attr-defined]


def _anchor(name: str) -> str:
    """A place to link to, in the built documentation and in Markdown itself; headings are such places already."""
    return f'<a id="{name}"></a>'


# ---------------------------------------------------------------- learning-rate rules


def rules() -> Iterator[str]:
    """Each rule with its formula and its source."""
    for name in (*RATE_RULES, *SCALINGS):
        yield f"## `{name}`\n\n{rule_fact(name, 'Summary')}\n"
        yield f"```text\n{rule_fact(name, 'Formula')}\n```\n"
        source = re.sub(
            r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", rule_fact(name, "Source")
        )
        yield f"Source: {source}\n"


# ---------------------------------------------------------------- study.yaml


def study_keys() -> Iterator[str]:
    """Every key of a study file by section, with type, default and meaning from its JSON Schema."""
    schema = StudySpec.model_json_schema()
    yield from _section("", schema, schema["$defs"], 2)
    yield "## Domains\n"
    yield "The domain of a parameter: a plain value, a list of values, or one of these.\n"
    for name in DOMAINS:
        part = schema["$defs"][name]
        yield f"{_anchor(f'domain-{name.lower()}')}\n\n### {name}\n\n{_sentence(part['description'])}\n"
        yield from _table(f"domain-{name.lower()}.", part, schema["$defs"])


def _section(path: str, part: Schema, parts: Mapping[str, Schema], level: int) -> Iterator[str]:
    """One section's keys as a table, then its subsections."""
    if path:
        yield (
            f"{_anchor(path)}\n\n" if "." in path else ""
        ) + f"{'#' * level} {path}\n\n{_sentence(part['description'])}\n"
    yield from _table(f"{path}." if path else "", part, parts)
    for key, value in part["properties"].items():
        for name in _referred(value):
            if name not in DOMAINS:
                inner = f"{path}.{key}" if path else key
                yield from _section(inner, parts[name], parts, min(level + bool(path), 4))


def _table(prefix: str, part: Schema, parts: Mapping[str, Schema]) -> Iterator[str]:
    yield "| key | value | default | meaning |\n|---|---|---|---|"
    for key, value in part["properties"].items():
        name = f"{prefix}{key}"
        # The heading of a section already has the anchor of its key.
        inside = [one for one in _referred(value) if one not in DOMAINS]
        shown = ("" if inside else _anchor(name)) + f"[`{key}`](#{name})"
        default = "**required**" if key in part.get("required", ()) else _default(value, bool(inside))
        meaning = value.get("description") or parts[inside[0]]["description"]
        yield f"| {shown} | {_kind(value, parts)} | {default} | {_sentence(meaning)} |"
    yield ""


def _referred(value: Schema) -> list[str]:
    """Names of the sections a key's value may refer to, without duplicates."""
    found = re.findall(
        r'"#/\$defs/(\w+)"',
        json.dumps({key: value[key] for key in ("$ref", "anyOf", "items") if key in value}),
    )
    return list(dict.fromkeys(found))


def _default(value: Schema, section: bool) -> str:
    default = value.get("default")
    if default is None or default in ([], {}):
        return ""
    if isinstance(default, dict):
        if "value" not in default:
            return "" if section else f"`{json.dumps(default)}`"
        default = default["value"]
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"


def _kind(value: Schema, parts: Mapping[str, Schema]) -> str:
    """The type of a key's value, in words."""
    if set(_referred(value)) >= set(DOMAINS):
        return "[domain](#domains)"
    words = list(dict.fromkeys(_kinds(value, parts)))
    words = [
        word
        for word in words
        if word.replace("integer", "number", 1) not in words or not word.startswith("integer")
    ]
    return " or ".join(word for word in words if word != "nothing").replace("|", "\\|")


def _kinds(value: Schema, parts: Mapping[str, Schema]) -> Iterator[str]:
    if "enum" in value:
        yield ", ".join(f"`{one}`" for one in value["enum"])
    elif "$ref" in value:
        yield "section"
    elif "anyOf" in value:
        bound = _bounds(value)
        for one in value["anyOf"]:
            yield from (
                f"{word}{bound if word in ('number', 'integer') else ''}" for word in _kinds(one, parts)
            )
    else:
        match value.get("type"):
            case "array" if "prefixItems" in value:
                yield f"list of {len(value['prefixItems'])} numbers"
            case "array":
                yield f"list of {_many(value.get('items', {}))}"
            case "object":
                yield "mapping"
            case "string":
                yield "text"
            case "boolean":
                yield "true or false"
            case "null":
                yield "nothing"
            case kind:
                yield f"{kind}{_bounds(value)}"


def _many(items: Schema) -> str:
    return {"string": "texts", "object": "mappings"}.get(items.get("type", ""), "values")


def _bounds(value: Schema) -> str:
    """Bounds such as ≥ 1."""
    signs = {"minimum": "≥", "ge": "≥", "exclusiveMinimum": ">", "gt": ">", "maximum": "≤", "le": "≤"}
    return ",".join(f" {sign} {value[key]:,}" for key, sign in signs.items() if key in value)


def _sentence(text: str) -> str:
    """Text on one line, for a table cell."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    for page, content in written_pages():
        page.write_text(content, encoding="utf-8")
