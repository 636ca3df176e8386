"""What a study decides, as values: the plan of an attempt, what follows from its end, what is next, and when the study ends."""
