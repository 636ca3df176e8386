"""What the processes of a race do; apart from the tests, so that they import nothing else."""

from bsearch.search.store.tables import Tables
from bsearch.search.suggest.optuna.database import open_storage


def open_database(url: str, start) -> None:  # type: ignore[no-untyped-def]
    start.wait()
    Tables(url).save_study("law", "law", {}, {})
    open_storage(url)
