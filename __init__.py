"""Hyperparameter search that treats batch size as what it is: a number to be tuned."""

from importlib.metadata import version

__version__ = version("bsearch")
