"""Other people's training loops as trials: Hugging Face Trainer and Lightning."""
