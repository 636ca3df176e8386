"""Every example in a docstring runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import bsearch
import pytest

# Alembic's environment is only ever run by Alembic.
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(bsearch.__path__, "bsearch.")
    if not module.name.startswith(("bsearch.tests", "bsearch.benchmarks"))
    and ".migrations." not in module.name
)


# Only importable beside the framework that each of them adapts.
ADAPTERS = {
    "bsearch.objectives.adapters.huggingface": "transformers",
    "bsearch.objectives.adapters.lightning": "lightning",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.frameworks] if name in ADAPTERS else []) for name in MODULES],
)
def test_examples_in_docstrings_run(name: str) -> None:
    if name in ADAPTERS:
        pytest.importorskip(ADAPTERS[name])
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_the_walk_finds_the_rules() -> None:
    assert "bsearch.spaces.learning_rate" in MODULES
