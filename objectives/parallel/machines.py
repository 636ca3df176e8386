"""Ranks on other machines: how the process of rank 0 reaches them, and what runs them there.

Each of them has a connection of its own to the process of rank 0, as ranks on one machine have a pipe. On every other machine a
host process starts its ranks, reports why one died, and kills them once its connection to the process of rank 0 ends.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge, wait
from typing import Any, Protocol

from .meeting import Meeting, Output, RankDiedError, death, start_ranks

# A machine that answers nothing for about this long is lost: a cable that was pulled says nothing.
SILENT_S = 20
# How long whoever connects may take to show that it knows the key.
_SHOWS_KEY_S = 5
# How long a host may take to say why one of its ranks died.
_TELLS_S = 2.0
# How often it is checked whether the other machines have given up starting.
_CHECKED_S = 0.2


class Machines(Protocol):
    """The machines that a trial's ranks are on, with this process's own as the first."""

    @property
    def address(self) -> str:
        """This machine's, as the others reach it."""

    @property
    def shares(self) -> tuple[int, ...]:
        """How many ranks each machine has, this one first."""

    def start(self, machine: int, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function in a process on one of the others; it runs until it returns, or until this process ends."""

    def failed(self) -> str:
        """Why one of these calls has ended in an error; empty while none has."""

    def has_left(self, machine: int) -> bool:
        """Whether a machine, whose ranks no longer answer, is gone itself; may take as long as the cluster takes to know."""


class RemoteRanks:
    """The ranks of a trial that are on other machines, as seen from the process of rank 0.

    Args:
        machines: where they are.
        shares: how many each of the machines has, this one first.
        meeting: where all ranks meet.
    """

    def __init__(self, machines: Machines, shares: Sequence[int], meeting: Meeting) -> None:
        self._machines = machines
        self._key = secrets.token_bytes(32)
        self._hosts: dict[int, Connection] = {}  # by the first rank of each
        self._host_of: dict[int, tuple[int, int]] = {}  # the machine of a rank, and the first rank there
        self._told: dict[int, str] = {}
        self._server = socket.create_server((machines.address, 0))
        port = self._server.getsockname()[1]
        first = shares[0]
        for machine, share in enumerate(shares[1:], 1):
            ranks = range(first, first + share)
            self._host_of |= dict.fromkeys(ranks, (machine, first))
            machines.start(machine, host_ranks, meeting, ranks.start, ranks.stop, port, self._key)
            first += share

    def connected(self, within_s: float) -> list[Connection]:
        """The connections to the ranks, in their order, once all are there.

        Raises:
            RankDiedError: some are not there in time.
        """
        pipes: dict[int, Connection] = {}
        until = time.monotonic() + within_s
        self._server.settimeout(_CHECKED_S)
        while len(pipes) < len(self._host_of) or len(self._hosts) < len({*self._host_of.values()}):
            if why := self._machines.failed():
                raise RankDiedError(f"ranks on another machine did not start: {why}", machine=True)
            if time.monotonic() > until:
                missing = ", ".join(map(str, sorted(set(self._host_of) - set(pipes))))
                raise RankDiedError(
                    f"ranks {missing} on other machines did not connect to {self._server.getsockname()[0]} within "
                    f"{within_s:.0f} s: machines of one trial must reach one another on all ports"
                )
            try:
                connection, role, number = _accepted(self._server, self._key)
            except (AuthenticationError, EOFError, OSError):
                continue  # no connection, or one without the key
            (self._hosts if role == "host" else pipes)[number] = connection
        self._server.close()
        return [pipes[rank] for rank in sorted(pipes)]

    def lost(self, rank: int) -> RankDiedError:
        """The error of a rank whose connection has ended."""
        machine, first = self._host_of[rank]
        host = self._hosts[first]
        try:
            while rank not in self._told and wait([host], _TELLS_S):
                number, how = host.recv()
                self._told[number] = how
        except (EOFError, OSError):
            pass
        if rank in self._told:
            return RankDiedError(f"rank {rank} {self._told[rank]}")
        return RankDiedError(
            f"rank {rank}, on another machine, stopped responding", machine=self._machines.has_left(machine)
        )

    def close(self) -> None:
        """Let go of the other machines, which then kill what is left of their ranks."""
        self._server.close()
        for host in self._hosts.values():
            host.close()


def host_ranks(meeting: Meeting, first: int, end: int, port: int, key: bytes) -> None:
    """Run the ranks from `first` to before `end` on this machine, until they have ended or the connection to rank 0 has.

    Args:
        port, key: where the process of rank 0 waits for them at the meeting's address, and how it knows them.
    """

    def connected(role: str, number: int) -> Connection:
        connection: Any = Client((meeting.address, port), authkey=key)
        _end_when_silent(connection.fileno())
        connection.send((role, number))
        return connection  # type: ignore[no-any-return]

    host = connected("host", first)
    processes = start_ranks(
        meeting, [(rank, connected("rank", rank)) for rank in range(first, end)], output := Output()
    )
    output.close()
    ranks: dict[Any, tuple[int, Any]] = {
        child.sentinel: (rank, child) for rank, child in enumerate(processes, first)
    }
    try:
        while ranks:
            for ready in wait([host, *ranks]):
                if ready is host:
                    host.recv()  # nothing is ever sent: it is closed
                else:
                    rank, process = ranks.pop(ready)
                    process.join()
                    host.send((rank, death(process)))
    except (EOFError, OSError):
        pass  # rank 0, or its machine, is gone
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _accepted(server: socket.socket, key: bytes) -> tuple[Connection, str, int]:
    """The next connection of one who knows the key: of the host or of a rank, and its number."""
    made, _ = server.accept()
    made.settimeout(None)
    connection = Connection(made.detach())
    _receive_within(connection.fileno(), _SHOWS_KEY_S)
    deliver_challenge(connection, key)
    answer_challenge(connection, key)
    role, number = connection.recv()
    _receive_within(connection.fileno(), 0)  # however long
    _end_when_silent(connection.fileno())
    return connection, role, number


def _receive_within(number: int, seconds: int) -> None:
    with socket.socket(fileno=os.dup(number)) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def _end_when_silent(number: int) -> None:
    """Make a connection end once the other side's machine has been silent for a while, which TCP alone would never notice."""
    with socket.socket(fileno=os.dup(number)) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sys.platform == "linux":
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_S // 4)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENT_S // 4)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_S)
