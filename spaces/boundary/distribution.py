"""What is installed: the distribution, whose name is not the package's, since `bsearch` is another project on the index."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "batchsearch"  # as in pyproject.toml


def installed_version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "not installed"  # a checkout on a machine with little more than torch
