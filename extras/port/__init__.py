"""A recipe's batch on other devices: `recipe.py` reads it, `ported.py` plans, `told.py` prints, `edit.py` writes."""
