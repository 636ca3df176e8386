"""What the laws of trials say, printed: samples by batch, the next size, and verdicts on old runs."""
