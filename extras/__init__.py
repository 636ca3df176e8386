"""What is rarely used. Nothing below `commands` imports it: its exporters and trackers are found by their entry points."""
