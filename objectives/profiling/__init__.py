"""Memory and step time of a task, known before the first trial."""
