"""The commands, by what they are for: each reads, calls and prints."""
