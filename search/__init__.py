"""What happens on the driver: what to try next, what to keep, and the front that comes of it."""
