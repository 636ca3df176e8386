"""What a training step is made of beside the loop: its clock, its samples held for a second pass, gradient caching."""
