"""What is rarely used. Nothing below `commands` imports it: it is found by entry points."""
