"""What to try next, and when to stop: the samplers and the stopping rules, over Optuna."""
