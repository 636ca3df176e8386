"""Trials as runs of the experiment trackers that teams look at: MLflow, Weights & Biases, TensorBoard."""
