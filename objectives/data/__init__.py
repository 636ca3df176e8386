"""What is trained on: which samples a step sees, in which order, and how they are read."""
