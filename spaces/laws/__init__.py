"""What a device allows and takes: laws of memory and of step time, the profile that holds them, and cards by name."""
