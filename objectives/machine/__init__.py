"""What a process asks of its machine: environment variables, a device's memory, NVIDIA's own program."""
