"""The templates that `bsearch init` writes: a study file and a task."""
