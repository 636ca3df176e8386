"""What a study or a table of runs says beyond its front: the best rate at each batch, samples to a target, larger models."""
