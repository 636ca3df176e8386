"""One study's life on the driver: profiles, suggestions, attempts, outcomes."""
