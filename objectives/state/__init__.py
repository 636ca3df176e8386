"""The state of a training: saved, and taken up again."""
