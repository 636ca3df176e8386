"""What is measured, a file for stages that are about one thing, and the tasks that they train."""
