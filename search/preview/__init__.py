"""What can be known before a run: a study tried on this machine, its forecast, the machine itself, and what a step takes."""
