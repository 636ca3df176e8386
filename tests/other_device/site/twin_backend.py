"""What torch asks of a backend's module. `import torch` loads it by its entry point, as it loads those that vendors install."""

from __future__ import annotations

import os
import types
from typing import Any


def load() -> None:
    import torch

    torch.ops.load_library(os.environ["TWIN_LIBRARY"])
    torch._register_device_module("twin", _module(torch))


def _module(torch: Any) -> types.ModuleType:
    module: Any = types.ModuleType("torch.twin")

    def generator() -> Any:
        return torch._C._accelerator_getDefaultGenerator(0)

    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda index: None
    module.synchronize = lambda device=None: None
    module.get_device_name = lambda device=None: "a twin of the host"
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.manual_seed_all = module.manual_seed = lambda seed: generator().manual_seed(seed)
    module.get_rng_state = lambda device=None: generator().get_state()
    module.set_rng_state = lambda state, device=None: generator().set_state(state)
    return module
