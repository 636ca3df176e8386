"""Where trials run when one process is not enough: Ray."""
