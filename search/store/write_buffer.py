"""A driver's writes, many to a transaction.

A commit waits for the disk, and a trial has much to write in its life: two dozen facts, its attempts, measurements and outcome.
What must not be lost is committed at once; the rest goes along with it, or follows within a second.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from sqlalchemy.engine import Connection, Engine

from .database import RetryPolicy, transaction

# While the database answers, nothing waits longer than this to be written.
LATEST_S = 1.0

Write = Callable[[Connection], object]


class WriteBuffer:
    """Writes in the order in which they were added, committed together.

    Args:
        url: of the database.
        retry_policy: for when it is unavailable; then all of a commit is written again, so every write must be idempotent.
        first: runs first in every commit; if it raises, nothing of that commit is written.
    """

    def __init__(
        self, url: str, engine: Engine, retry_policy: RetryPolicy, first: Write = lambda connection: None
    ) -> None:
        self._first = first
        self._url, self._engine, self._retry_policy = url, engine, retry_policy
        self._writes: list[Write] = []
        self._committing, self._starting = threading.RLock(), threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._failed: Exception | None = None

    def add(self, write: Write) -> None:
        """Write it with the next commit.

        Raises:
            StorageError: a commit has failed since the last call; what it was to write is written with the next one.
        """
        self._writes.append(write)
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._commit_in_time, daemon=True, name="bsearch-write"
                )
                self._thread.start()
        if (failed := self.failed()) is not None:
            raise failed

    def failed(self) -> Exception | None:
        """The error of a background commit that failed, returned once; None if none did."""
        failed, self._failed = self._failed, None
        return failed

    def commit(self) -> None:
        """Write what was added so far.

        Raises:
            StorageError: the database stays unavailable, or refuses.
        """
        if not self._writes:
            return
        with self._committing:
            writes = list(self._writes)

            def write_all() -> None:
                with transaction(self._url, self._engine) as connection:
                    self._first(connection)
                    for write in writes:
                        write(connection)

            self._retry_policy(write_all)
            del self._writes[: len(writes)]

    def drop(self) -> None:
        """Forget what has not been written."""
        with self._committing:
            self._writes.clear()

    def close(self) -> None:
        """Write what is left, and end the thread.

        Raises:
            StorageError: as `commit`.
        """
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        self.commit()

    def _commit_in_time(self) -> None:
        while not self._closed.wait(LATEST_S):
            try:
                self.commit()
            except Exception as error:
                self._failed = error
