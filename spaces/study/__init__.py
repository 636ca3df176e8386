"""The study file: a module for each of its parts, what must agree between them, and reading it."""
