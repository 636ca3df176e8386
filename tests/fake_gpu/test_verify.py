"""`bsearch verify` on the fake GPU, stage by stage; those of large models and of time need a real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bsearch.cli import main
from bsearch.verify.report import Report
from click.testing import CliRunner

from fake_gpu.child import in_child
from fake_gpu.device import Cards


def verified() -> dict[str, Any]:
    stages = [word for name in ("machine", "energy", "exactness") for word in ("--stage", name)]
    result = CliRunner().invoke(main, ["verify", "--device", "gpu", "--serial", "--out", "found.json", *stages])
    return {"code": result.exit_code, "printed": result.output, "found": json.loads(Path("found.json").read_text())}


@pytest.mark.long
def test_the_stages_of_facts_and_exactness_hold() -> None:
    found = in_child(verified, Cards(mib=2000))
    assert found["code"] == 0, found["printed"]
    report = Report.from_dict(found["found"])
    assert report.holds, report.markdown()
    assert report.device == "Fake GPU"
    facts = {fact.name: fact.value for stage in report.stages for fact in stage.facts}
    assert facts["memory"] == "2000 MiB, 4 multiprocessors"
    assert facts["CUDA's context, and other processes"] == "24 MiB"
    assert "no readable energy counter" in facts["counter of energy"]
    assert facts["training loss of two runs of one seed"].endswith("0 apart")
