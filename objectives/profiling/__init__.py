"""Memory and step time of a task, measured before the first trial."""
