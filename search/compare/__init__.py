"""Whether one of two studies is better, or was luckier."""
