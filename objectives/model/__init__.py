"""What is done to a task's model before it trains."""
