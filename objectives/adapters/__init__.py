"""Third-party training loops as trials: Hugging Face Trainer and Lightning."""
