"""Machines made of network namespaces: each has an address of its own, and can be cut off, killed and started again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
# A lost machine is missed within seconds, so that a test need not wait for minutes.
_MISSED_SOON = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _plain_environment() -> dict[str, str]:
    """What a machine's own shell would have: not what a Ray of this process alone is told, which is to keep to the loopback."""
    return {name: value for name, value in os.environ.items() if name != "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"}


class Machine:
    """One namespace with one address; what runs in it are real processes with a network stack of their own."""

    def __init__(self, network: Network, number: int) -> None:
        self.name, self.address = f"{network.name}n{number}", f"10.231.77.{number}"
        self._bridge, self._cable, self._network = network.bridge, f"{network.name}c{number}", network
        self.processes: list[subprocess.Popen[bytes]] = []
        _ip("netns", "add", self.name)
        _ip("link", "add", self._cable, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        _ip("-n", network.bridge_home, "link", "set", "lo", "up")
        _ip("link", "set", self._cable, "netns", network.bridge_home)
        _ip("-n", network.bridge_home, "link", "set", self._cable, "master", network.bridge, "up")
        _ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", self.name, "link", "set", "eth0", "up")
        _ip("-n", self.name, "link", "set", "lo", "up")

    def start(
        self, command: Sequence[str | Path], log: Path, *, lacks: Path | None = None, **variables: str
    ) -> subprocess.Popen[bytes]:
        """Start a program on this machine, in a process group of its own.

        Args:
            lacks: a folder of other machines that it does not see: what is theirs alone is not to be leant on.
        """
        alone = (
            []
            if lacks is None
            else ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(lacks)]
        )
        with log.open("ab") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *alone, *map(str, command)],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**_plain_environment(), **self._network.variables, **variables},
            )
        self.processes.append(process)
        return process

    def ray(
        self, folder: Path, *, head: Machine | None = None, cpus: int = 1, lacks: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start Ray here: the head of a cluster, or a member of `head`'s."""
        place = (
            [f"--address={head.address}:6379"]
            if head
            else ["--head", "--port=6379", "--include-dashboard=false"]
        )
        temp = [] if head else [f"--temp-dir={self._network.ray_folder.name}"]
        command = [
            BIN / "ray",
            "start",
            *place,
            *temp,
            f"--node-ip-address={self.address}",
            f"--num-cpus={cpus}",
            "--block",
        ]
        return self.start(command, folder / f"{self.name}.log", lacks=lacks)

    def cut_off(self) -> None:
        """Pull its cable."""
        _ip("-n", self.name, "link", "set", "eth0", "down")

    def plug_in(self) -> None:
        _ip("-n", self.name, "link", "set", "eth0", "up")

    def pids(self) -> list[int]:
        listed = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True
        )
        return [int(pid) for pid in listed.stdout.split()]

    def kill(self) -> None:
        """As a machine that loses its power: everything on it is gone at once."""
        until = time.monotonic() + 10
        while (pids := self.pids()) and time.monotonic() < until:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        for process in self.processes:
            process.wait(timeout=10)
        self.processes.clear()


class Network:
    """Machines that see one another, and nothing else sees."""

    def __init__(self) -> None:
        self.name = f"bs{uuid.uuid4().hex[:6]}"
        self.bridge, self.bridge_home = "switch", f"{self.name}h"
        self.machines: list[Machine] = []
        # Its sockets' paths may have 107 bytes, which a test's own folder would use up.
        self.ray_folder = tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True)
        self.variables = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": uuid.uuid4().hex * 2,
            **_MISSED_SOON,
        }
        _ip("netns", "add", self.bridge_home)
        _ip("-n", self.bridge_home, "link", "add", self.bridge, "type", "bridge")
        _ip("-n", self.bridge_home, "link", "set", self.bridge, "up")

    def machine(self) -> Machine:
        self.machines.append(Machine(self, len(self.machines) + 1))
        return self.machines[-1]

    def close(self) -> None:
        for machine in self.machines:
            machine.kill()
            _ip("netns", "del", machine.name)
        _ip("netns", "del", self.bridge_home)
        self.ray_folder.cleanup()


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """A network of the test's own; skips where this machine lets nobody make one."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the program ip (Debian's package iproute2)")
    try:
        made = Network()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    try:
        yield made
    finally:
        made.close()
