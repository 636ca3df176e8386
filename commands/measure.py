"""Commands that measure a task before its study: memory, step times, batches, plans."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import click

from ..search.report.completion import study_files
from ..search.report.stdio.console import terminal
from ..spaces.errors import cut, plain
from ..spaces.laws.cards import card_named
from ..spaces.learning_rate import RATE_RULES, OptimizerSettings, RuleConstants, scaled_settings
from ..spaces.plan import plan_batch
from ..spaces.study.file import read_study
from ..spaces.study.spec import StudySpec
from .group import documents_only, epilog, located_faults, main
from .options import VALUE, json_option, set_option, study_in, study_keys, study_of_task, with_settings

# The batch of a reference rate that is given without one.
_AT_BATCH = 256
# What some rules have of their own.
_VALUES = {
    "power": "exponent",
    "saturating": "noise batch",
    "surge": "noise batch",
    "adamw_tau": "weight decay",
}


@main.command(epilog=epilog("bsearch profile study.yaml --png profile.png --out profile.json"))
@click.argument("study", type=click.Path(path_type=Path), shell_complete=study_files)
@click.option("--png", type=click.Path(path_type=Path), help="Plot memory and speed into this file.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the profile here, for `retime` and `plan`.")
@click.option(
    "--seconds", type=click.FloatRange(min=0), help="Seconds of real steps; default: 5 for memory, budget.profile_s for speed."
)
@click.option("--device-like", metavar="CARD", help="Predict memory on a GPU that is not here, such as 'A100 80GB'.")
@click.option("--energy", is_flag=True, help="Also measure the device's power, as if energy_j were an objective.")
@set_option
@json_option
def profile(
    study: Path,
    png: Path | None,
    out: Path | None,
    seconds: float | None,
    device_like: str | None,
    energy: bool,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Predict memory and step time of the study in STUDY, and measure as much as time allows.

    Prints peak memory by micro-batch (each size is traced, none extrapolated) and where it goes, the largest micro-batch
    under memory.limit, and the step time fitted to whole steps timed here, with the fastest accumulation for each
    effective batch. With --device-like, memory alone, traced as CUDA would run it; nothing is measured.
    """
    if device_like is not None and energy:
        raise click.UsageError("--device-like measures nothing; remove --energy")
    card = None if device_like is None else card_named(device_like)
    spec = study_in(study, settings)
    from ..search.preview.check import profile_study
    from ..search.report.export import json_text
    from ..search.report.terminal.profile import profile_document, profile_parts, profile_picture
    from ..spaces.boundary.files import write_file

    console = terminal(as_json)
    with located_faults(study), documents_only(as_json):
        document = profile_document(spec, profile_study(spec, seconds, card, energy=energy))
    for path, content in ((png, lambda: profile_picture(document)), (out, lambda: json_text(document))):
        if path is not None:
            write_file(path, content())
    if as_json:
        click.echo(json_text(document), nl=False)
        return
    for part in profile_parts(document, console.width):
        console.print(part)
    for path in (png, out):
        if path is not None:
            console.print(f"wrote {path}", style="dim")


@main.command(
    epilog=epilog(
        "bsearch bench study.yaml --sizes around:128,around:512\n  bsearch bench tasks.py:Cifar --set training.precision=bf16"
    )
)
@click.argument("study", metavar="STUDY|TASK", shell_complete=study_files)
@click.option("--sizes", default="around:128", show_default=True, help="Effective batches: 100,127,128 or around:128.")
@click.option("--repeats", type=click.IntRange(min=2), default=8, show_default=True, help="Rounds; each times every size.")
@set_option
@json_option
def bench(
    study: str,
    sizes: str,
    repeats: int,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Time training and inference at many batch sizes: do powers of two pay off on your model and device?

    Sizes are timed in interleaved rounds, and only differences larger than the noise are reported. Also finds the
    largest micro-batch that fits, and tries the sizes that a rule of thumb for convolutional nets suggests.
    """
    from ..search.preview.bench import run_bench, sizes_of
    from ..search.report.export import json_text
    from ..search.report.terminal.bench import bench_tables

    wanted = sizes_of(sizes)
    spec = _benched(study, wanted, settings)
    console = terminal(as_json)
    with documents_only(as_json), console.status("timing ...") as status:
        document = run_bench(spec, wanted, repeats, status.update)
    if as_json:
        click.echo(json_text(document), nl=False)
        return
    for part in bench_tables(document):
        console.print(part)


def _benched(study: str, sizes: list[int], settings: tuple[str, ...]) -> StudySpec:
    """The study file, or a study of the task with just these sizes."""
    if study.endswith(".py"):
        raise click.UsageError(f"a task is named with its file: write {study}:NAME")
    if ":" not in study or os.path.lexists(study):
        return with_settings(read_study(Path(study)), settings)
    space = {"effective_batch": sizes, "reference_rate": 0.01, "rule": "constant"}
    name = re.sub(r"[^A-Za-z0-9]+", "-", study.rpartition(":")[2]) or "bench"
    return study_of_task(name, study, space, settings)


class _RateAt(click.ParamType[tuple[float, int]]):
    """A rate and the batch that it is for, written 0.1@256."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, int]:
        text, at, batch = value.partition("@")
        rate = VALUE.convert(text, param, ctx)
        if rate <= 0 or (at and not (batch.isdecimal() and int(batch))):
            self.fail(f"expected a rate above 0, and its batch, such as 0.1@256; got {cut(value, 60)!r}", param, ctx)
        return rate, int(batch) if at else _AT_BATCH


class _RuleOf(click.ParamType[tuple[str, float | None]]):
    """A scaling rule and the value that it has of its own, written power:0.6."""

    name = "rule"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float | None]:
        rule, colon, text = value.partition(":")
        if rule not in RATE_RULES:
            self.fail(f"expected one of {', '.join(RATE_RULES)}; got {cut(rule, 60)!r}", param, ctx)
        if not colon:
            return rule, None
        if rule not in _VALUES:
            self.fail(f"expected no value of {rule}, got {cut(text, 60)!r}. These have one: {', '.join(_VALUES)}.", param, ctx)
        number = VALUE.convert(text, param, ctx)
        if number <= 0 and rule != "power":
            self.fail(f"expected the {_VALUES[rule]} of {rule} above 0, got {text}", param, ctx)
        return rule, number


_RATE, _RULE = _RateAt(), _RuleOf()


@main.command(epilog=epilog("bsearch plan 500 --devices 2 --cap 96 --rate 0.1@256 --rule linear"))
@click.argument("effective_batch", type=click.IntRange(min=1))
@click.option("--devices", type=click.IntRange(min=1), default=1, show_default=True, help="Data-parallel workers.")
@click.option("--cap", type=click.IntRange(min=1), help="The largest micro-batch that fits in one device's memory.")
@click.option("--accumulation", type=click.IntRange(min=1), help="Micro-batches per step; raised where fewer do not fit.")
@click.option(
    "--smallest",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="The smallest micro-batch the model works with.",
)
@click.option(
    "--rate",
    type=_RATE,
    metavar="RATE[@BATCH]",
    help="Reference learning rate, and the batch that it is for; default batch: 256.",
)
@click.option(
    "--rule",
    type=_RULE,
    metavar="RULE[:VALUE]",
    default="sqrt",
    show_default=True,
    help=f"{', '.join(RATE_RULES)}; VALUE is power's exponent (default: 0.5), the noise batch of saturating and surge in "
    "samples, or adamw_tau's weight decay at the reference batch.",
)
@click.option(
    "--profile",
    "profile_file",
    type=click.Path(path_type=Path),
    help="A profile from `bsearch profile STUDY --out FILE`: its limits apply, and training time and memory are known.",
)
@click.option(
    "--epochs",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="With --profile: epochs that the training time is for.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="With --profile: one of its combinations of parameters that change cost, such as space.width=32.",
)
@json_option
def plan(
    effective_batch: int,
    devices: int,
    cap: int | None,
    accumulation: int | None,
    smallest: int,
    rate: tuple[float, int] | None,
    rule: tuple[str, float | None],
    profile_file: Path | None,
    epochs: float,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Print how one step of EFFECTIVE_BATCH samples is made: shares, micro-batches, weights, learning rate, known time."""
    from ..search.report.terminal.plan import plan_document, plan_parts

    known, chosen = None, study_keys(settings)
    if other := next((section for section in chosen if section != "space"), None):
        raise click.UsageError(f"--set: expected a parameter that changes cost, such as space.width=32, got a key of {other}")
    if profile_file is not None:
        from ..search.analysis.retime import planned_on, read_profile

        batch_plan, known = planned_on(
            read_profile(profile_file, timed=False),
            effective_batch,
            epochs,
            devices=devices,
            accumulation=accumulation,
            largest_micro_batch=cap,
            smallest_micro_batch=smallest,
            parameters=chosen.get("space", {}),
        )
    elif chosen:
        raise click.UsageError("--set chooses one of a profile's combinations; add --profile FILE")
    else:
        batch_plan = plan_batch(
            effective_batch,
            devices=devices,
            accumulation=accumulation,
            largest_micro_batch=cap,
            smallest_micro_batch=smallest,
        )
    name, value = rule
    scaled, optimizer = None, None
    if rate is not None:
        reference_rate, at_batch = rate
        exponent = value if name == "power" and value is not None else 0.5
        noise_batch = value if name in ("saturating", "surge") else None
        weight_decay = value if name == "adamw_tau" and value is not None else 0.0
        optimizer = scaled_settings(
            name,
            OptimizerSettings(reference_rate, weight_decay=weight_decay),
            reference_batch=at_batch,
            effective_batch=effective_batch,
            constants=RuleConstants.at(at_batch, exponent, noise_batch),
        )
        scaled = name, reference_rate, at_batch, optimizer
    if as_json:
        click.echo(json.dumps(plan_document(batch_plan, name, optimizer, known), indent=2))
        return
    console = terminal()
    for part in plan_parts(batch_plan, accumulation, scaled, epochs, known):
        console.print(part)


@main.command(name="port", epilog=epilog('bsearch port recipe.yaml --to "1x 24GiB" --from 8 --out ported.yaml'))
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--to", "target", required=True, metavar="DEVICES", help="Such as '1x 24GiB' or '2x RTX 4090 24GB'.")
@click.option(
    "--from",
    "devices",
    type=click.IntRange(min=1),
    help="Devices that the recipe was written for, if it does not say; default: 1.",
)
@click.option("--model", help="A folder with its config.json, or a name on the hub; default: the recipe's.")
@click.option(
    "--profile",
    "profile_file",
    type=click.Path(path_type=Path),
    help="A profile from `bsearch profile STUDY --out FILE` on the new devices, for the step time.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Write the recipe with the new values here.")
@json_option
def port_recipe(
    recipe: Path,
    target: str,
    devices: int | None,
    model: str | None,
    profile_file: Path | None,
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
    from ..search.report.export import json_text
    from ..spaces.boundary.files import write_file

    wanted, found = target_of(target), read_recipe(recipe)
    console = terminal(as_json)
    with documents_only(as_json), console.status("tracing memory ..."):
        ported = port(found, wanted, devices, model, profile_file)
    if out is not None:
        write_file(out, rewritten(found, ported.changes, wanted.devices))
    if as_json:
        click.echo(json_text(port_document(ported)), nl=False)
        return
    for line in port_lines(ported):
        click.echo(plain(line))
    if out is not None:
        click.echo(f"wrote {out}")
