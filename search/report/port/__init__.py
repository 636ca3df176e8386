"""A fine-tuning recipe's batch on other devices: `recipe.py` reads it, `ported.py` plans, `edit.py` writes it back."""
