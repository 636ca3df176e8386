"""What is rarely used. Nothing below `commands` imports it: all but `port` is found by entry points."""
