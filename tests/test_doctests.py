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
    if not module.name.startswith(("bsearch.tests", "bsearch.benchmarks")) and ".migrations." not in module.name
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_the_walk_finds_the_rules() -> None:
    assert "bsearch.spaces.learning_rate" in MODULES
