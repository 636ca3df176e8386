"""What to try next, and when to stop: the suggesters, with Optuna's samplers among them, and the stopping rules."""
