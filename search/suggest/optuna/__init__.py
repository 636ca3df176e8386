"""Optuna: its samplers, ours as one of them, and the copy of a study that its dashboard shows."""
