"""Run a study in this process, without Ray: `python -m bsearch.verify.stages.serial_study study.yaml`."""

import sys
from pathlib import Path

from ...objectives.task_code import task_code_hash
from ...search.run.driver import run_study
from ...search.run.serial import SerialRunner
from ...spaces.study.file import read_study


def main() -> None:
    spec = read_study(Path(sys.argv[1]))
    run_study(spec, SerialRunner(spec.devices), task_code_hash(spec.task))


if __name__ == "__main__":
    main()
