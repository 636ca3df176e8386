"""Commands that measure a task, and that split a recipe's batch over other devices."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from ..search.report.completion import study_files
from ..search.report.stdio.console import give, json_text, say, terminal
from ..spaces.laws.cards import card_named
from .group import documents_only, epilog, located_faults, main
from .options import (
    json_option,
    out_option,
    profile_option,
    set_option,
    study_in,
)


@main.command(
    epilog=epilog("bsearch profile study.yaml --out profile.json\n  bsearch profile study.yaml --device-like 'A100 80GB'")
)
@click.argument("study", metavar="STUDY", shell_complete=study_files)
@click.option("--device-like", metavar="CARD", help="Predict memory on a GPU that is not here, such as 'A100 80GB'.")
@out_option("a file, for --profile of other commands.")
@set_option
@json_option
def profile(study: str, device_like: str | None, out: Path | None, settings: tuple[str, ...], as_json: bool) -> None:
    """Predict memory and step time of the study in STUDY, and measure as much as budget.profile_s allows.

    Prints peak memory by micro-batch (each size is traced, none extrapolated) and where it goes, the largest micro-batch
    under memory.limit, and the step time fitted to whole steps timed here. With --device-like, memory alone, traced as CUDA
    would run it; nothing is measured.
    """
    file = Path(study)
    card = None if device_like is None else card_named(device_like)
    spec = study_in(file, settings)
    from ..search.preview.check import profile_study
    from ..search.report.terminal.profile import profile_document, profile_parts

    with located_faults(file), documents_only(as_json):
        document = profile_document(spec, profile_study(spec, card))
    _print_document(document, profile_parts(document), out, as_json)


def _print_document(document: Any, parts: Iterable[Any], out: Path | None, as_json: bool) -> None:
    """A document, for programs or for people; and in a file."""
    if out is not None:
        _write(out, json_text(document))
    if as_json:
        give(json_text(document))
        return
    for part in parts:
        terminal().print(part)


def _write(path: Path, content: str | bytes) -> None:
    from ..spaces.boundary.files import write_file

    say(f"wrote {write_file(path, content)}", err=True)


@main.command(name="port", epilog=epilog('bsearch port recipe.yaml --onto "1x 24GiB" --written-for 8 --out ported.yaml'))
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--onto", "target", required=True, metavar="DEVICES", help="Such as '1x 24GiB' or '2x RTX 4090 24GB'.")
@click.option(
    "--written-for",
    "devices",
    type=click.IntRange(min=1),
    metavar="N",
    help="Devices that the recipe was written for, if it does not say; default: 1.",
)
@click.option("--model", help="A folder with its config.json, or a name on the hub; default: the recipe's.")
@profile_option("of the new devices, for the step time")
@out_option("a file, for the recipe with the new values.")
@json_option
def port_recipe(
    recipe: Path,
    target: str,
    devices: int | None,
    model: str | None,
    profile: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Split the batch of a fine-tuning RECIPE over other devices: the same steps in other micro-batches.

    RECIPE is a YAML or JSON file of Axolotl, LLaMA-Factory, TRL or transformers' Trainer, or a shell script with a torchrun
    command. Its memory is traced for the new devices, and what was not understood is listed.
    """
    from ..extras.port.edit import rewritten
    from ..extras.port.memory import target_of
    from ..extras.port.ported import port
    from ..extras.port.recipe import read_recipe
    from ..extras.port.told import port_document, port_lines

    wanted, found = target_of(target), read_recipe(recipe)
    console = terminal(as_json)
    with documents_only(as_json), console.status("tracing memory ..."):
        ported = port(found, wanted, devices, model, profile)
    if out is not None:
        _write(out, rewritten(found, ported.changes, wanted.devices))
    if as_json:
        give(json_text(port_document(ported)))
        return
    for line in port_lines(ported):
        say(line)
