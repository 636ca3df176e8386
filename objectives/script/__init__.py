"""Other people's training scripts, run as they are: `run_script` in a task's function (docs/scripts.md)."""
