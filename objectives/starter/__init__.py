"""What `bsearch init` writes: a study file and a task to change into one's own."""
