"""Several devices in one trial: the ranks, what they exchange, and what each of them keeps."""
