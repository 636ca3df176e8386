"""The command that measures a task."""

from __future__ import annotations

from pathlib import Path

import click

from ..search.report.completion import study_files
from ..search.report.stdio.answer import give_answer
from ..search.report.stdio.console import json_text, say, terminal
from ..spaces.laws.cards import card_named
from .group import documents_only, epilog, located_faults, main
from .options import json_option, out_option, set_option, study_in


@main.command(
    epilog=epilog(
        "bsearch profile study.yaml --out profile.json\n  bsearch profile study.yaml --device-like 'A100 80GB'"
    )
)
@click.argument("study", metavar="STUDY", shell_complete=study_files)
@click.option(
    "--device-like", metavar="CARD", help="Predict memory on a GPU that is not here, such as 'A100 80GB'."
)
@out_option("a file, for `bsearch show --profile`.")
@set_option
@json_option
def profile(
    study: str, device_like: str | None, out: Path | None, settings: tuple[str, ...], as_json: bool
) -> None:
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
    if out is not None:
        from ..spaces.boundary.files import write_file

        say(f"wrote {write_file(out, json_text(document))}", err=True)
    if as_json:
        give_answer("profile", document, whole=True)
        return
    for part in profile_parts(document):
        terminal().print(part)
