"""Attacks on the command line and the Python interface, counted by kind: what tests/rough stands on.

Each test file there tries one kind of rough ground from outside, as a user or an enemy has it: through commands, the public
Python interface and plain SQL alone, so that the same file tries an older version too (`table.py`).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

Attack = Callable[[str], AbstractContextManager[None]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent / "rough" in item.path.parents:
            item.add_marker(pytest.mark.rough)


@pytest.fixture
def attack(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> Iterator[Attack]:
    """One attack: `with attack("a user name with @"): assert ...`. One that breaks does not keep the others from being tried;
    the test fails at its end, with all that broke.
    """
    tried, broken = list[str](), list[str]()

    @contextmanager
    def one(name: str) -> Iterator[None]:
        tried.append(name)
        try:
            yield
        except Exception as error:
            broken.append(f"{name}: {type(error).__name__}: {str(error)[:2000]}")

    yield one
    record_property("attacks", [request.module.KIND, len(tried), len(broken)])
    assert not broken, f"{len(broken)} of {len(tried)} broke:\n" + "\n".join(broken)


_counts: dict[str, Counter[str]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for name, value in report.user_properties:
        if name == "attacks" and report.when == "teardown":
            kind, tried, broken = value
            _counts.setdefault(kind, Counter()).update(tried=tried, broken=broken)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not _counts:
        return
    if file := os.environ.get("BSEARCH_ATTACKS"):
        Path(file).write_text(json.dumps(_counts))
    terminalreporter.section("attacks")
    for kind, counts in sorted(_counts.items()):
        terminalreporter.write_line(f"{kind:50} tried {counts['tried']:5}   broken {counts['broken']:4}")
