"""What is asked of an accelerator that is not called cuda: its own backend answers, written in Python (torch 2.14 on)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fake_gpu.child import in_child
from fake_gpu.device import Cards

pytestmark = pytest.mark.long


class Twin:
    """What torch asks of a backend's module; it keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.state = torch.arange(8, dtype=torch.uint8)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "get_device_name":
            raise AttributeError(name)
        answers = {
            "is_available": True,
            "is_initialized": True,
            "_is_in_bad_fork": False,
            "current_device": 0,
            "device_count": 1,
        }

        def answer(*_: Any) -> Any:
            self.asked.append(name)
            return answers.get(name)

        return answer

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return self.state

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.state = state


def asked() -> dict[str, Any]:
    from bsearch.objectives.machine import accelerator
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    twin = Twin()
    _setup_privateuseone_for_python_backend("twin", backend_module=twin)
    device = accelerator.device_of("gpu")
    before = len(twin.asked)
    accelerator.synchronize(device)
    waited = twin.asked[before:]
    accelerator.synchronize(torch.device("cpu"))
    accelerator.set_random_state(torch.full((8,), 7, dtype=torch.uint8))
    accelerator.release_cached()
    accelerator.reset_peaks()
    accelerator.limit_share(0.5, device)
    return {
        "backend": accelerator.backend(),
        "device": str(device),
        "name": accelerator.device_name(),
        "count": accelerator.device_count(),
        "waited": waited,
        "waited in all": len(twin.asked[before:]),
        "random": accelerator.random_state(device).tolist(),
        "peaks": accelerator.peak_bytes(),
        "memory": [*accelerator.memory_info(), accelerator.reserved_bytes(), accelerator.total_bytes(device)],
        "pins": accelerator.pins(device),
        "gpu": [
            accelerator.is_gpu(device),
            accelerator.is_gpu(torch.device("cpu")),
            accelerator.is_gpu(torch.device("meta")),
        ],
        "uuid": accelerator.device_uuid(),
    }


@pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="torch before 2.14 takes no backend written in Python",
)
def test_another_backend_answers_for_itself_and_what_it_does_not_know_is_left_out() -> None:
    found = in_child(asked, Cards(count=0))
    assert (found["backend"], found["device"], found["name"], found["count"]) == ("twin", "twin:0", "twin", 1)
    assert found["waited"] == ["synchronize"]
    assert found["random"] == [7] * 8
    assert found["peaks"] == [0, 0] and found["memory"] == [0, 0, 0, 0]
    assert not found["pins"] and found["gpu"] == [True, False, False] and found["uuid"] == ""
