"""A worker that is asked to leave: its training writes a checkpoint at the next chance, and ends there."""

from __future__ import annotations

import signal

# Asks a worker's process to leave.
LEAVE_SIGNAL = signal.SIGUSR1

_asked = False


class Leaving(Exception):
    """Ends a training after its checkpoint is written, because its worker was asked to leave."""


def ask_to_leave() -> None:
    """Ask the training of this process to leave; may be called in a signal handler."""
    global _asked
    _asked = True


def asked_to_leave() -> bool:
    return _asked


def stay() -> None:
    """Forget what was asked of an earlier attempt."""
    global _asked
    _asked = False
