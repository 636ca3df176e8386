"""The state of a training: saved, taken up again, and left for a while by a branch."""
