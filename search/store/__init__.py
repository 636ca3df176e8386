"""The database: our tables, Optuna's beside them, the driver's lock, and a study as it is stored."""
