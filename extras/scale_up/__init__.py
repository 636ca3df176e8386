"""What studies of small trainings say of a larger one: `bsearch ask STUDY... --scale`."""
