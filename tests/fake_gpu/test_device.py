"""The fake GPU behaves as a GPU where bsearch can tell: devices do not mix, memory ends, and waits are counted."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fake_gpu import device as fake
from fake_gpu.child import in_child
from fake_gpu.device import MIB, Cards

pytestmark = pytest.mark.long


def error_of(function: Any) -> str:
    """The first line of what it raises, after the error's type; empty if it raises nothing."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def waits_of(function: Any) -> int:
    before = fake.card().waits
    function()
    return fake.card().waits - before


def tensors() -> dict[str, Any]:
    found: dict[str, Any] = {}
    ones = torch.ones(5, 3, device="cuda")
    found["device"] = [str(ones.device), ones.is_cuda, str(torch.ones(2, device="cuda:1").device)]
    with torch.cuda.device(1):
        found["device inside"] = [
            str(torch.ones(2, device="cuda").device),
            str(torch.ones(2).to("cuda").device),
        ]
    found["device after"] = torch.cuda.current_device()
    found["mixed"] = [
        error_of(partial(torch.add, ones, other)) for other in (torch.ones(3), torch.ones(3, device="cuda:1"))
    ]
    found["number"] = error_of(lambda: ones + torch.tensor(2.0))
    found["numpy"] = error_of(ones.numpy)
    found["beyond the last card"] = error_of(lambda: torch.ones(2, device="cuda:2"))

    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    before = list(net.parameters())
    net.to("cuda")
    found["same parameters"] = [one is other for one, other in zip(before, net.parameters(), strict=True)]
    net(ones).square().sum().backward()
    on_card = [parameter.grad.cpu() for parameter in net.parameters()]  # type: ignore[union-attr]
    net.zero_grad()
    net.cpu()
    found["same parameters back"] = [
        one is other for one, other in zip(before, net.parameters(), strict=True)
    ]
    net(ones.cpu()).square().sum().backward()
    found["same gradients"] = [
        torch.equal(one, other.grad) for one, other in zip(on_card, net.parameters(), strict=True)
    ]

    in_thread: list[str] = []
    thread = threading.Thread(
        target=lambda: in_thread.append(str((torch.ones(3, device="cuda") + 1).to("cuda").device))
    )
    thread.start()
    thread.join()
    found["in a thread"] = in_thread

    pinned, pageable = torch.ones(8).pin_memory(), torch.ones(8)
    small = torch.tensor([True, False, True, True, False], device="cuda")
    found["waits"] = {
        "item": waits_of(ones.sum().item),
        "float": waits_of(lambda: float(ones.sum())),
        "to the CPU": waits_of(ones.cpu),
        "mask": waits_of(lambda: ones[small]),
        "blocking copy": waits_of(lambda: pageable.to("cuda")),
        "pinned copy": waits_of(lambda: pinned.to("cuda", non_blocking=True)),
        "arithmetic": waits_of(lambda: (ones * 2).sum() + 1),
        "fill": waits_of(lambda: torch.full((3,), 2.0, device="cuda")),
    }

    torch.manual_seed(0)
    of_cpu, of_card = torch.rand(4), torch.rand(4, device="cuda")
    torch.manual_seed(0)
    torch.rand(4, device="cuda")
    found["the CPU's numbers are its own"] = torch.equal(torch.rand(4), of_cpu)
    state = torch.cuda.get_rng_state()
    after = torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(state)
    found["a state gives the same numbers"] = torch.equal(torch.rand(4, device="cuda").cpu(), after.cpu())
    found["numbers go on"] = torch.equal(of_card.cpu(), after.cpu())

    with torch.autocast("cuda", torch.bfloat16):
        found["autocast"] = str((ones @ ones.T).dtype)
    return found


def on_cards() -> dict[str, Any]:
    return {**tensors(), "memory": memory()}  # the latter ends with a broken card


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return in_child(on_cards, Cards(count=2, mib=100), PYTORCH_ALLOC_CONF="expandable_segments:True")


def test_tensors_lie_on_the_card_that_was_asked_for(found: dict[str, Any]) -> None:
    assert found["device"] == ["cuda:0", True, "cuda:1"]
    assert found["device inside"] == ["cuda:1", "cuda:1"]
    assert found["device after"] == 0
    assert found["in a thread"] == ["cuda:0"]
    assert "invalid device ordinal" in found["beyond the last card"]


def test_devices_do_not_mix(found: dict[str, Any]) -> None:
    assert ["found at least two devices" in error for error in found["mixed"]] == [True, True]
    assert found["number"] == ""
    assert found["numpy"].startswith("TypeError")


def test_a_model_that_moves_keeps_its_parameters_and_has_the_cpus_gradients(found: dict[str, Any]) -> None:
    assert all(found["same parameters"])
    assert all(found["same parameters back"])
    assert all(found["same gradients"])


def test_waits_are_counted(found: dict[str, Any]) -> None:
    waits = found["waits"]
    assert {name for name, count in waits.items() if count} == {
        "item",
        "float",
        "to the CPU",
        "mask",
        "blocking copy",
    }


def test_a_card_has_random_numbers_of_its_own(found: dict[str, Any]) -> None:
    assert found["the CPU's numbers are its own"]
    assert found["a state gives the same numbers"]
    assert not found["numbers go on"]


def test_autocast_follows_cuda(found: dict[str, Any]) -> None:
    assert found["autocast"] == "torch.bfloat16"


def memory() -> dict[str, Any]:
    found: dict[str, Any] = {}
    card = fake.card()

    def floats(mebibytes: float) -> torch.Tensor:
        return torch.empty(int(mebibytes * MIB / 4), device="cuda")

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    free, total = torch.cuda.mem_get_info()
    found["free, total"] = [free // MIB, total // MIB]
    kept = floats(10)
    view = kept[:5].view(5, 1)
    found["one"] = [torch.cuda.memory_allocated() // MIB, torch.cuda.memory_reserved() // MIB]
    del kept
    found["a view holds it"] = torch.cuda.memory_allocated() // MIB
    del view
    torch.cuda.empty_cache()
    found["none"] = [
        torch.cuda.memory_allocated(),
        torch.cuda.memory_reserved(),
        torch.cuda.max_memory_allocated() // MIB,
    ]
    found["too much"] = error_of(lambda: floats(90))
    torch.cuda.set_per_process_memory_fraction(0.5)
    found["half"] = [error_of(partial(floats, mebibytes)) for mebibytes in (40, 60)]
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()
    card.neighbour_bytes = 40 * MIB
    found["beside a neighbour"] = [torch.cuda.mem_get_info()[0] // MIB, error_of(lambda: floats(60))]
    card.neighbour_bytes = 0
    labels = torch.tensor([0, 9], device="cuda")
    found["asserted"] = error_of(
        lambda: nn.functional.cross_entropy(torch.zeros(2, 3, device="cuda"), labels)
    )
    uses = (
        lambda: torch.ones(2, device="cuda"),
        torch.cuda.synchronize,
        torch.cuda.empty_cache,
        torch.cuda.mem_get_info,
    )
    found["after it"] = [error_of(use) for use in uses]
    return found


def test_memory_ends_and_a_broken_card_stays_broken(found: dict[str, Any]) -> None:
    found = found["memory"]
    assert found["free, total"] == [76, 100]
    assert found["one"] == [10, 20]
    assert found["a view holds it"] == 10
    assert found["none"] == [0, 0, 10]
    assert found["too much"].startswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 90.00 MiB.")
    assert [bool(error) for error in found["half"]] == [False, True]
    assert found["beside a neighbour"][0] == 36
    assert found["beside a neighbour"][1].startswith("OutOfMemoryError")
    assert found["asserted"] == "AcceleratorError: CUDA error: device-side assert triggered"
    assert set(found["after it"]) == {"AcceleratorError: CUDA error: device-side assert triggered"}
