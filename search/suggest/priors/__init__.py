"""What is known before the first trial: of batches and rates, by the study's author, and from earlier runs."""
