"""What the server that trials are forked from imports: whatever a first training would import, and no code of the user's."""

import atexit
import gc
import importlib
import os
import sys
import threading
from contextlib import suppress

import torch._dynamo
import torch._subclasses.fake_tensor
import torch.distributed.nn
import torch.nn.parallel
import torch.utils._python_dispatch
import torch.utils.flop_counter

from ..profiling import task_profile  # noqa: F401
from . import rank_main  # noqa: F401
from .meeting import LIBRARIES


def _import(name: str) -> None:
    """Import a module, or what is in one, by its dotted name; what cannot be imported is the training's affair."""
    with suppress(Exception, SystemExit):
        if importlib.util.find_spec(name):
            importlib.import_module(name)
            return
    with suppress(Exception, SystemExit):
        module, _, member = name.rpartition(".")
        getattr(importlib.import_module(module), member)


def _may_be_forked() -> bool:
    """Whether nothing runs here but this, and no device has a context; threads of NumPy's and of allocators know of forks."""
    return threading.active_count() == 1 and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


if libraries := os.environ.pop(LIBRARIES, "").split():
    for library in libraries:
        _import(library)
    if not _may_be_forked():
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606  # once more, without them
# What is here now is nobody's garbage, and is never copied for being looked at.
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # extensions count what is left at the end
