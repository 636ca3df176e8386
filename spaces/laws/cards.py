"""Graphics cards that may not be here: what their makers and drivers say of them, until a measurement replaces it."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import Fault, StudyFileError, near_miss

_MIB = 1 << 20
# What a process takes of a card beside its tensors: CUDA's context and the code of its libraries. Drivers differ by a third.
_CONTEXT_BYTES = 500 * _MIB


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU by its name.

    Args:
        memory_bytes: as the driver reports it, which is less than the name says.
        multiprocessors: streaming multiprocessors.
    """

    name: str
    memory_bytes: int
    multiprocessors: int

    @property
    def usable_bytes(self) -> int:
        """What a training process can allocate."""
        return self.memory_bytes - _CONTEXT_BYTES


# Memory in MiB and multiprocessors, from the makers' data sheets and `nvidia-smi`.
_KNOWN = {
    "T4 16GB": (15360, 40),
    "V100 16GB": (16384, 80),
    "V100 32GB": (32768, 80),
    "L4 24GB": (23034, 58),
    "A10 24GB": (23028, 72),
    "L40S 48GB": (46068, 142),
    "RTX 3090 24GB": (24576, 82),
    "RTX 4090 24GB": (24564, 128),
    "RTX 5090 32GB": (32607, 170),
    "A100 40GB": (40960, 108),
    "A100 80GB": (81920, 108),
    "H100 80GB": (81559, 132),
    "H200 141GB": (143771, 132),
}
CARDS = {
    name: Card(name, memory * _MIB, multiprocessors) for name, (memory, multiprocessors) in _KNOWN.items()
}


def card_named(name: str) -> Card:
    """The card of this name, whatever its case and spaces.

    Raises:
        StudyFileError: it is not in the table.

    >>> card_named("a100-80gb").name
    'A100 80GB'
    """
    known = {_plain(card_name): card for card_name, card in CARDS.items()}
    if _plain(name) not in known:
        similar = near_miss(name.upper(), list(CARDS))
        fault = f"expected one of {', '.join(CARDS)}; got {name!r}.{similar} On the card itself, `bsearch profile` measures."
        raise StudyFileError(Fault("device-like", fault))
    return known[_plain(name)]


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
