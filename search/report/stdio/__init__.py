"""The process's own streams, and the console on them."""
