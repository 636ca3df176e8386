"""Answer `bsearch ask STUDY... --scale`: print the best settings of a larger training, and write the study to run next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from ...search.report.stdio.answer import give_answer
from ...search.report.stdio.console import terminal
from ...search.store.stored import StoredStudy
from ...spaces.boundary.files import write_file
from ...spaces.errors import StudyFileError
from ...spaces.readable import from_here
from .fit import scale_up
from .next_study import next_study
from .shown import next_sentence, scale_up_document, scale_up_parts


def answer(studies: Sequence[StoredStudy], data: float, model: float, next_file: Path | None, as_json: bool) -> None:
    """Print the best settings of a training that is larger than the largest tried.

    Args:
        data, model: its samples and its parameters, over those of the largest tried.
        next_file: where the study is written that would narrow the intervals most.

    Raises:
        StudyFileError: the studies differ in more than their size, or have too few trials.
    """
    _check_alike(studies)
    names = ", ".join(study.name for study in studies)
    found = scale_up(names, [record for study in studies for record in study.records], data, model)
    console = terminal(as_json)
    if as_json:
        give_answer("scale", scale_up_document(names, found))
    else:
        for part in scale_up_parts(names, found):
            console.print(part)
    if next_file is None:
        return
    if found.next is not None:
        widest = found.next.size.parameters
        study = next(
            study for study in studies if any((trial.facts.model_parameters or 1) == widest for trial in study.records)
        )
        write_file(next_file, yaml.safe_dump(next_study(study.spec, study.records, found.next), sort_keys=False))
    console.print(f"\n{next_sentence(from_here(next_file.absolute()), found.next)}")


def _check_alike(studies: Sequence[StoredStudy]) -> None:
    """Raise unless the studies are different ones of the same task and metric."""
    faults = []
    if len({(study.url, study.name) for study in studies}) < len(studies):
        faults.append("each study once")
    if len(metrics := {(study.front.metric, study.front.direction) for study in studies}) > 1:
        faults.append(f"one metric, got {' and '.join(sorted(name for name, _ in metrics))}")
    if len(tasks := {study.identity["task"]["name"] for study in studies}) > 1:
        faults.append(f"one task, got {' and '.join(sorted(tasks))}")
    if faults:
        raise StudyFileError(f"expected studies that differ in their size alone: {'; '.join(faults)}")
