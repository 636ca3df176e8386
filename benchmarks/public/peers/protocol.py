"""What a peer's process reads and writes: one JSON object a line, one answer to each. `space` begins a new search.

    {"space": {NAME: {"low", "high", "log", "integer"}}, "seed", "reference"}    {"version", "reports"}
    {"ask": NUMBER}                             {"parameters"}, perhaps "continues", a number asked before, "until", a fraction
    {"report": NUMBER, "fraction", "values"}    {"stop"}; only to peers that want reports
    {"tell": NUMBER, "fraction", "values"}      {}; the trial has trained to this fraction, and goes no further

Values are two, both to be minimised: log seconds as a share of the problem's range, and 1 - accuracy. `reference` is the
hypervolume's reference point in them. This file needs the standard library alone.
"""

import json
import sys
from abc import ABC, abstractmethod
from importlib.metadata import version
from typing import Any, ClassVar


class Peer(ABC):
    """What a peer has to answer; `package` is the distribution whose version is printed."""

    package: ClassVar[str]
    reports: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, space: dict[str, dict[str, Any]], seed: int, reference: list[float]) -> None: ...

    @abstractmethod
    def ask(self, number: int) -> dict[str, Any]: ...

    def report(self, number: int, fraction: float, values: list[float]) -> bool:
        """Whether to stop the trial."""
        return False

    @abstractmethod
    def tell(self, number: int, fraction: float, values: list[float]) -> None: ...


def serve(kind: type[Peer]) -> None:
    """Answer until the input ends. What libraries print goes to stderr."""
    answers, sys.stdout = sys.stdout, sys.stderr
    peer = None
    for line in sys.stdin:
        match json.loads(line):
            case {"space": space, "seed": seed, "reference": reference}:
                peer = kind(space, seed, reference)
                answer = {"version": f"{kind.package} {version(kind.package)}", "reports": kind.reports}
            case {"ask": number} if peer is not None:
                answer = peer.ask(number)
            case {"report": number, "fraction": fraction, "values": values} if peer is not None:
                answer = {"stop": peer.report(number, fraction, values)}
            case {"tell": number, "fraction": fraction, "values": values} if peer is not None:
                peer.tell(number, fraction, values)
                answer = {}
            case unknown:
                raise ValueError(f"expected a line of the protocol, got {unknown!r}")
        print(json.dumps(answer), file=answers, flush=True)
