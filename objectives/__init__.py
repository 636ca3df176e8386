"""What happens on a worker: the user's task, exact batches, the training loop and its measurements.

Start with `Task` in `task.py`: users write `data` and `model`; everything else has a default.
"""
