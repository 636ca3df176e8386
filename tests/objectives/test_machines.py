"""Laws of one trial's ranks on several machines, which are processes here that share nothing but the network."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
from bsearch.objectives.parallel import machines as machines_module
from bsearch.objectives.parallel.machines import RemoteRanks
from bsearch.objectives.parallel.meeting import Meeting, RankDiedError
from bsearch.objectives.parallel.rank_processes import RankProcesses
from conftest import TASKS
from helpers import on
from rank_jobs import evaluated, ids, trained, who

# Starting ranks takes seconds.
pytestmark = pytest.mark.slow

WIDE = f"{TASKS}:WideNet"


class Here:
    """`Machines` whose others are processes of this one."""

    def __init__(self, *shares: int, left: bool = False) -> None:
        self.address, self.shares, self.left = "127.0.0.1", shares, left
        self.hosts: list[BaseProcess] = []

    def start(self, machine: int, function: Callable[..., None], *arguments: Any) -> None:
        self.hosts.append(get_context("spawn").Process(target=function, args=arguments))
        self.hosts[-1].start()

    def failed(self) -> str:
        return next((f"its host exited with {host.exitcode}" for host in self.hosts if host.exitcode), "")

    def has_left(self, machine: int) -> bool:
        return self.left


@pytest.fixture
def spread() -> Iterator[Callable[..., RankProcesses]]:
    made: list[RankProcesses] = []

    def make(machines: Here) -> RankProcesses:
        made.append(RankProcesses(sum(machines.shares), "cpu", 1, machines))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_ranks_over_machines_equal_one_process_and_end_with_their_job(
    spread: Callable[..., RankProcesses],
) -> None:
    here = Here(2, 1)
    ranks = spread(here)
    for batch, accumulation in [(385, 3), (7, 1), (3, 1)]:
        (alone,) = trained(WIDE, on(1, batch), 5)
        (shared,) = ranks.run(trained, WIDE, on(3, batch, accumulation), 5)
        for one, other in zip(alone, shared, strict=True):
            assert float((one - other).norm()) <= 1e-12 * float(one.norm())
    (alone_scores,) = evaluated(WIDE, on(1, 8), 77)
    (scores,) = ranks.run(evaluated, WIDE, on(3, 8), 77)
    assert scores == alone_scores
    ranks.shutdown()
    for host in here.hosts:
        host.join(20)
        assert host.exitcode == 0


@pytest.mark.long
def test_a_rank_killed_on_another_machine_is_told_and_the_others_end(
    spread: Callable[..., RankProcesses],
) -> None:
    here = Here(1, 2)
    ranks = spread(here)
    (pids,) = ranks.run(ids)
    reports = ranks.run(who, 10**9)
    next(reports)
    os.kill(pids[2], signal.SIGKILL)
    with pytest.raises(RankDiedError, match="rank 2 was killed by SIGKILL") as told:
        for _ in reports:
            time.sleep(0.01)
    assert not told.value.machine
    assert not ranks.alive
    _gone(pids)


@pytest.mark.long
def test_a_machine_that_is_lost_is_told_as_such(spread: Callable[..., RankProcesses]) -> None:
    here = Here(1, 2, left=True)
    ranks = spread(here)
    (pids,) = ranks.run(ids)
    reports = ranks.run(who, 10**9)
    next(reports)
    here.hosts[0].kill()
    with pytest.raises(RankDiedError, match=r"rank \d, on another machine, stopped responding") as told:
        for _ in reports:
            time.sleep(0.01)
    assert told.value.machine
    _gone(pids)


@pytest.mark.long
def test_ranks_end_when_the_process_of_rank_0_is_gone() -> None:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    first = context.Process(target=_first_machine, args=(theirs,))
    first.start()
    pids, host = ours.recv()
    os.kill(first.pid or 0, signal.SIGKILL)
    _gone([*pids, host])
    first.join()


def _first_machine(pipe: Any) -> None:
    here = Here(1, 2)
    ranks = RankProcesses(3, "cpu", 1, here)
    (pids,) = ranks.run(ids)
    pipe.send((pids, here.hosts[0].pid))
    time.sleep(100)


def _gone(pids: list[int]) -> None:
    until = time.monotonic() + 20
    while alive := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < until, alive
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_strangers_are_no_ranks_and_missing_ones_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines_module, "_SHOWS_KEY_S", 1)

    class Nobody(Here):
        def start(self, machine: int, function: Callable[..., None], *arguments: Any) -> None:
            self.port = arguments[-2]

    nobody = Nobody(1, 2)
    remote = RemoteRanks(nobody, nobody.shares, Meeting(3, "cpu", 1, "127.0.0.1", 1))
    with (
        socket.create_connection(("127.0.0.1", nobody.port)) as silent,
        socket.create_connection(("127.0.0.1", nobody.port)) as rude,
    ):
        rude.sendall(b"\0\0\0\4rank")
        with pytest.raises(
            RankDiedError, match=r"ranks 1, 2 on other machines did not connect to 127\.0\.0\.1 within 3 s"
        ):
            remote.connected(3)
        assert silent.recv(100)  # it was asked for the key, and got nothing more
    remote.close()


def test_what_keeps_another_machine_from_starting_is_said(spread: Callable[..., RankProcesses]) -> None:
    class Broken(Here):
        def start(self, machine: int, function: Callable[..., None], *arguments: Any) -> None: ...

        def failed(self) -> str:
            return "no such file"

    with pytest.raises(RankDiedError, match="ranks on another machine did not start: no such file"):
        spread(Broken(1, 1))
