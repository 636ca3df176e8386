"""A GPU made of CPU memory, and tests that train on it: how bsearch behaves on a GPU, on machines that have none."""
