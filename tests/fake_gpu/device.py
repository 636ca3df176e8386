"""A CUDA device made of CPU memory: after `install`, this process trains on tensors that say they lie on `cuda:0`.

Every operation runs on the CPU, on real numbers, but tensors keep to their device as on CUDA: mixing devices fails, autocast
and `is_cuda` follow CUDA's rules, memory comes from bsearch's replay of the caching allocator with a limited size, random
numbers from a generator of the device's own, and whatever would make the host wait is counted. Backward passes use bsearch's
own walk of the autograd graph, because autograd's engine asks the driver for a stream.

What it cannot do: kernels that the CPU does not have (cuDNN's recurrent nets, nested tensors), several processes that share one
card, NCCL, and time: a step takes as long as on the CPU, and streams run one after another.
"""

from __future__ import annotations

import json
import os
import re
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

MIB = 1 << 20

# What CUDA's context takes of a card before the first tensor.
CONTEXT_BYTES = 24 * MIB

# The variable that tells a process, and all that it starts, which cards it has.
VARIABLE = "FAKE_GPU"

ASSERT = "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"

_CPU = torch.device("cpu")


def segments_of(allocator: Any) -> list[list[tuple[int, int, str]]]:
    """Every segment of a `CachingAllocator` as its blocks in order: (address, bytes, state)."""
    from bsearch.objectives.profiling.memory.allocator import _first_of

    blocks = [*allocator._used.values(), *allocator._all_free(), *allocator._first.values()]
    firsts: dict[int, Any] = {id(first): first for first in map(_first_of, blocks)}
    segments: list[list[tuple[int, int, str]]] = []
    for first in sorted(firsts.values(), key=lambda block: block.address):
        segments.append([])
        while first is not None:
            segments[-1].append((first.address, first.size, first.state))
            first = first.after
    return segments


@dataclass(frozen=True, slots=True)
class Cards:
    """The cards of a machine.

    Args:
        count: of cards, all alike.
        mib: memory of each.
        neighbour_mib: what other programs take of each.
        broken: the error that every use of a card raises; empty: none.
        maps: the driver can map memory into segments that grow; those of WSL2 could not.
        caps: whether `set_per_process_memory_fraction` has an effect.
    """

    count: int = 1
    mib: float = 512
    neighbour_mib: float = 0
    broken: str = ""
    maps: bool = True
    caps: bool = True

    def to_variable(self) -> str:
        return json.dumps(asdict(self))


class Card:
    """One card: its memory, its random numbers, and what it has been asked to do.

    Attributes:
        neighbour_bytes: what other programs take now; may be changed at any time.
        broken: once set, every use raises it: CUDA's errors of a context are for good.
        counts: operations, copies, and what the host waited for.
    """

    def __init__(self, index: int, cards: Cards) -> None:
        self.index, self.device = index, torch.device("cuda", index)
        self.total_bytes = int(cards.mib * MIB)
        self.neighbour_bytes = int(cards.neighbour_mib * MIB)
        self.broken, self._maps, self.caps = cards.broken, cards.maps, cards.caps
        self.counts: Counter[str] = Counter()
        self.limit_bytes = float("inf")  # of `set_per_process_memory_fraction`
        self.peak_live_bytes = 0
        self._allocator: Any = None
        self._storages: set[int] = set()  # those that have memory, by their addresses in C++
        # Cards of a machine without seeds differ from the CPU's generator.
        self._random_state = torch.Generator().manual_seed(index + 1).get_state()

    @property
    def allocator(self) -> Any:
        """Its caching allocator, which reads its settings at the first allocation."""
        if self._allocator is None:
            from bsearch.objectives.profiling.memory.allocator import CachingAllocator

            settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get(
                "PYTORCH_CUDA_ALLOC_CONF", ""
            )
            self._allocator = CachingAllocator(expandable="expandable_segments:true" in settings.lower())
        return self._allocator

    @property
    def free_bytes(self) -> int:
        """What is neither reserved here nor taken by others, as the driver counts it."""
        return max(self.total_bytes - self.neighbour_bytes - CONTEXT_BYTES - self.allocator.reserved_bytes, 0)

    @property
    def waits(self) -> int:
        """How often the host has waited for it."""
        return sum(count for what, count in self.counts.items() if what.startswith("wait: "))

    def check(self) -> None:
        """Raise what is wrong with it.

        Raises:
            torch.AcceleratorError: it is broken.
        """
        if self.broken:
            raise torch.AcceleratorError(self.broken)

    def wait(self, what: str) -> None:
        """The host waits until the card has done all its work."""
        self.check()
        self.counts[f"wait: {what}"] += 1
        if _sync_debug == "warn" and what != "synchronize":
            warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=4)

    def allocate(self, storage: torch.UntypedStorage) -> None:
        """Take memory for a storage, for as long as it lives; one that has memory keeps it.

        Raises:
            torch.OutOfMemoryError: it does not fit.
        """
        from bsearch.objectives.profiling.memory.allocator import AllocatorFullError

        key, size = storage._cdata, storage.nbytes()
        if not size or key in self._storages:
            return
        if self.allocator.expandable and not self._maps:
            raise torch.AcceleratorError("CUDA driver error: operation not supported")
        room = self.total_bytes - self.neighbour_bytes - CONTEXT_BYTES
        self.allocator.cap_bytes = min(self.limit_bytes, room) if self.caps else room
        try:
            self.allocator.allocate(key, size)
        except AllocatorFullError:
            self.counts["out of memory"] += 1
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size / MIB:.2f} MiB. GPU {self.index} has a total capacity of "
                f"{self.total_bytes / MIB:.2f} MiB of which {self.free_bytes / MIB:.2f} MiB is free."
            ) from None
        self._storages.add(key)
        weakref.finalize(storage, self._free, key).atexit = False
        self.peak_live_bytes = max(self.peak_live_bytes, self.allocator.live_bytes)

    def _free(self, key: int) -> None:
        self._storages.remove(key)
        self.allocator.free(key)

    def reset_peaks(self) -> None:
        self.allocator.reset_peak()
        self.peak_live_bytes = self.allocator.live_bytes

    def release_cached(self) -> None:
        self.check()
        self.allocator.release_cached()

    def random_state(self) -> Tensor:
        self.check()
        return self._random_state.clone()

    def set_random_state(self, state: Tensor) -> None:
        self.check()
        self._random_state = state.clone()

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Context in which the CPU's generator draws this card's random numbers."""
        of_cpu = torch.default_generator.get_state()
        torch.default_generator.set_state(self._random_state)
        try:
            yield
        finally:
            self._random_state = torch.default_generator.get_state()
            torch.default_generator.set_state(of_cpu)


# The cards of this process; empty until `install`.
cards: list[Card] = []
# Each thread's current card.
_thread = threading.local()
_sync_debug = "default"
# Storages in page-locked memory, by their addresses in C++.
_pinned: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()


def card(device: Any = None) -> Card:
    """The card that a device means, as functions of `torch.cuda` take it; None: the current one."""
    if isinstance(device, str):
        device = torch.device(device)
    index = device.index if isinstance(device, torch.device) else device
    index = getattr(_thread, "current", 0) if index is None or index < 0 else index
    if not 0 <= index < len(cards):
        raise torch.AcceleratorError("CUDA error: invalid device ordinal")
    return cards[index]


def _exchange(device: Any) -> int:
    """Make a card the current one; returns the one before. A negative index changes nothing."""
    before: int = getattr(_thread, "current", 0)
    if not isinstance(device, int) or device >= 0:
        _thread.current = card(device).index
    return before


class CudaTensor(Tensor):
    """A tensor that says it lies on a card; `held` has its values, on the CPU."""

    held: Tensor
    _card: Card

    @staticmethod
    def __new__(cls, held: Tensor, of: Card) -> CudaTensor:
        # Made as a FakeTensor is: autograd would ask a tensor that is on a GPU by itself for its stream.
        like = torch.empty_strided(held.size(), held.stride(), dtype=held.dtype, device="meta")
        made: CudaTensor = torch.Tensor._make_subclass(  # type: ignore[attr-defined]
            cls, like, False, dispatch_device=True, device_for_backend_keys=of.device
        )
        made.held, made._card = held, of
        of.allocate(held.untyped_storage())
        return made

    # Results are made by `_run`, which knows on which card they lie.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._card.device

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"CudaTensor({self.held!r}, device={self._card.device})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A saved tensor is read on machines without a card: it loads as one of the CPU."""
        self._card.wait("copy to the CPU")
        return self.held.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy with memory of its own on the same card, without a gradient."""
        if id(self) not in memo:
            with torch.no_grad():
                made = self.detach().clone()
            copied = nn.Parameter(made, self.requires_grad) if isinstance(self, nn.Parameter) else made
            memo[id(self)] = copied.requires_grad_(self.requires_grad)
        return memo[id(self)]

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first."
            )
        return self.detach().cpu().numpy()

    def tolist(self) -> Any:
        self._card.wait("tolist")
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


# Operations that take tensors of several devices.
_ACROSS = {"copy_", "_to_copy", "_copy_from", "set_", "_pack_padded_sequence", "_pad_packed_sequence"}
# Those whose indices may lie on the CPU, from where they are copied.
_INDEXES = {"index", "index_put_", "index_put", "_index_put_impl_"}
# Those whose result, or its size, the host has to know.
_READS = {
    "_local_scalar_dense": "item",
    "nonzero": "nonzero",
    "equal": "equal",
    "_unique2": "unique",
    "masked_select": "nonzero",
}
# What the CPU's kernels say where CUDA's kernels fail an assertion on the device.
_ASSERTED = re.compile(
    r"index -?\d+ is out of bounds|index out of range in self|Target -?\d+ is out of bounds|index \d+ out of"
)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU, as its tensors' cards would."""
    if func is torch.ops.prim.device.default and isinstance(args[0], CudaTensor):
        return args[0].device
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    traces = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    if traces or any(isinstance(leaf, FakeTensor) for leaf in leaves):
        return func(*args, **kwargs)
    name = func._schema.name.partition("::")[2]
    here = next((leaf._card for leaf in leaves if isinstance(leaf, CudaTensor)), None)
    target = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    there = card(target) if target is not None and target.type == "cuda" else None
    if here is None and there is None:
        return _run_on_cpu(func, args, kwargs)
    for used in {here, there} - {None}:
        used.check()  # type: ignore[union-attr]
        used.counts["operations"] += 1  # type: ignore[union-attr]
    if here is not None:
        _check_devices(name, args, leaves)
        if name in _READS or (name in _INDEXES and _reads_mask(args[1])):
            here.wait(_READS.get(name, "nonzero"))
    result_on = there if target is not None else here
    if name in ("_to_copy", "copy_"):
        _count_copy(name, args, kwargs, here, there)
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if there is not None:
        kwargs["device"] = _CPU
    plain_args, plain_kwargs = tree_map_only(CudaTensor, lambda one: one.held, (args, kwargs))
    draws = result_on if torch.Tag.nondeterministic_seeded in func.tags else None
    try:
        with torch._C._DisableTorchDispatch(), ExitStack() as stack:
            if draws is not None:
                stack.enter_context(draws.drawing())
            result = func(*plain_args, **plain_kwargs)
    except IndexError as error:
        if here is None or not _ASSERTED.search(str(error)):
            raise
        here.broken = ASSERT  # as with CUDA_LAUNCH_BLOCKING=1; otherwise a later operation would raise it
        raise torch.AcceleratorError(ASSERT) from None
    if name == "copy_":
        return args[0]
    if result_on is None or name == "_local_scalar_dense":
        return result
    wrapped = tree_map_only(
        Tensor, lambda one: CudaTensor(one, result_on) if type(one) is Tensor else one, result
    )
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if here is not None else wrapped


def _run_on_cpu(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation without a card; page-locked memory is ordinary memory that is known to be locked."""
    if not kwargs.get("pin_memory"):
        return func(*args, **kwargs)
    return _locked(func(*args, **{**kwargs, "pin_memory": False}))


def _locked(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    _pinned[storage._cdata] = storage
    return tensor


def _check_devices(name: str, args: Any, leaves: list[Tensor]) -> None:
    """Check that tensors of an operation lie on one device, but for a CPU's numbers, and indices.

    Raises:
        RuntimeError: they do not.
    """
    if name in _ACROSS:
        return
    on_cards = {leaf._card.index for leaf in leaves if isinstance(leaf, CudaTensor)}
    on_cpu = [
        leaf for leaf in leaves if not isinstance(leaf, CudaTensor) and leaf.device == _CPU and leaf.dim()
    ]
    if name in _INDEXES and isinstance(args[0], CudaTensor) and len(on_cards) == 1:
        for index in on_cpu:
            args[0]._card.wait("index on the CPU" if index.numel() else "")
        return
    devices = [*(f"cuda:{index}" for index in sorted(on_cards)), *(["cpu"] if on_cpu else [])]
    if len(devices) > 1:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {devices[0]} and {devices[1]}! "
            f"(aten::{name})"
        )


def _reads_mask(indices: Any) -> bool:
    """Whether an index is a mask, whose true elements have to be counted."""
    return any(
        isinstance(index, CudaTensor) and index.dtype in (torch.bool, torch.uint8) for index in indices
    )


def _count_copy(name: str, args: Any, kwargs: dict[str, Any], here: Card | None, there: Card | None) -> None:
    """Count a copy between devices, if it is one; from memory that is not page-locked, or to it, the host waits."""
    if name == "_to_copy":
        source, on_cpu, non_blocking = (
            args[0],
            kwargs.get("device") is not None and there is None,
            kwargs.get("non_blocking"),
        )
        target_card, target = (None, None) if on_cpu else (there or here, None)
    else:
        target, source = args[:2]
        target_card = target._card if isinstance(target, CudaTensor) else None
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking")
    source_card = source._card if isinstance(source, CudaTensor) else None
    if source_card is target_card:
        return
    if target_card is None:
        assert source_card is not None
        if torch.device(kwargs.get("device") or "cpu").type == "meta":
            return
        if not (non_blocking and target is not None and _is_pinned(target)):
            source_card.wait("copy to the CPU")
        source_card.counts["copies to the CPU"] += 1
        return
    if source_card is not None:
        target_card.counts["copies between cards"] += 1
        return
    target_card.counts["copies to the card"] += 1
    if not source.numel() or (name == "copy_" and not source.dim()):  # a number is an argument of a fill
        return
    if not non_blocking:
        target_card.wait("blocking copy to the card")
    elif not _is_pinned(source):
        target_card.counts["copies to the card from pageable memory"] += 1


def _is_pinned(tensor: Tensor, *_: Any) -> bool:
    return not isinstance(tensor, CudaTensor) and tensor.untyped_storage()._cdata in _pinned


def _pin_memory(tensor: Tensor, *_: Any) -> Tensor:
    if isinstance(tensor, CudaTensor):
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    return tensor if _is_pinned(tensor) else _locked(tensor.clone(memory_format=torch.preserve_format))


class _Operations(TorchDispatchMode):
    """Sees operations that make tensors, which have none on a card yet."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


_FUSED = {
    getattr(torch, name) for name in ("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_")
}


class _Functions(TorchFunctionMode):
    """Answers what functions ask the driver: which card `cuda` is; and runs fused optimizers, which a trace skips."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            device = args[1] if len(args) > 1 else kwargs.get("device")
            return args[0].to(card(device).device, non_blocking=kwargs.get("non_blocking", False))
        if func is Tensor.to:
            args = (args[0], *(_indexed(one) for one in args[1:]))
            kwargs = {name: _indexed(one) if name == "device" else one for name, one in kwargs.items()}
        if func in _FUSED and isinstance(args[0][0], CudaTensor):
            with torch._C.DisableTorchFunctionSubclass(), torch._C.DisableTorchFunction():
                return _run(getattr(torch.ops.aten, func.__name__).default, args, kwargs)
        return func(*args, **kwargs)


def _indexed(device: Any) -> Any:
    """`cuda` as the current card; all else as it is."""
    return card().device if isinstance(device, str | torch.device) and str(device) == "cuda" else device


def _properties(of: Card) -> SimpleNamespace:
    return SimpleNamespace(
        name="Fake GPU",
        total_memory=of.total_bytes,
        multi_processor_count=4,
        uuid=f"GPU-{of.index}",
        major=9,
        minor=0,
    )


def _set_sync_debug_mode(mode: str) -> None:
    global _sync_debug
    _sync_debug = mode


def _memory_info(of: Card) -> tuple[int, int]:
    of.check()
    return of.free_bytes, of.total_bytes


def _snapshot() -> list[dict[str, Any]]:
    found = []
    for each in cards:
        for segment in segments_of(each.allocator):
            states = {"used": "active_allocated", "free": "inactive"}
            blocks = [{"size": size, "state": states[state]} for _, size, state in segment if state in states]
            total = sum(block["size"] for block in blocks)
            kind = "small" if total <= 2 * MIB else "large"
            if blocks:
                about = {
                    "device": each.index,
                    "segment_type": kind,
                    "is_expandable": each.allocator.expandable,
                }
                found.append({**about, "total_size": total, "blocks": blocks})
    return found


def _seed(of: Card, seed: int) -> None:
    of.set_random_state(torch.Generator().manual_seed(seed & ((1 << 63) - 1)).get_state())


# What `torch.cuda` answers; a device, where there is one, comes first or last and may be left out.
_ANSWERS: dict[str, Callable[..., Any]] = {
    "is_available": lambda: True,
    "device_count": lambda: len(cards),
    "current_device": lambda: card().index,
    "is_initialized": lambda: True,
    "_lazy_init": lambda: None,
    "_is_in_bad_fork": lambda: False,
    "set_device": lambda device: _exchange(card(device).index) and None,
    "_exchange_device": _exchange,
    "_maybe_exchange_device": _exchange,
    "synchronize": lambda device=None: card(device).wait("synchronize"),
    "get_device_properties": lambda device=None: _properties(card(device)),
    "get_device_name": lambda device=None: _properties(card(device)).name,
    "get_device_capability": lambda device=None: (9, 0),
    "get_arch_list": lambda: ["sm_90"],
    "manual_seed": lambda seed: _seed(card(), seed),
    "manual_seed_all": lambda seed: [_seed(each, seed) for each in cards if not each.broken] and None,
    "get_rng_state": lambda device=None: card(device).random_state(),
    "set_rng_state": lambda state, device=None: card(device).set_random_state(state),
    "mem_get_info": lambda device=None: _memory_info(card(device)),
    "memory_allocated": lambda device=None: card(device).allocator.live_bytes,
    "memory_reserved": lambda device=None: card(device).allocator.reserved_bytes,
    "max_memory_allocated": lambda device=None: card(device).peak_live_bytes,
    "max_memory_reserved": lambda device=None: card(device).allocator.peak_reserved_bytes,
    "reset_peak_memory_stats": lambda device=None: card(device).reset_peaks(),
    "memory_stats": lambda device=None: {"num_alloc_retries": card(device).allocator.retries},
    "memory_snapshot": _snapshot,
    "empty_cache": lambda: [each.release_cached() for each in cards] and None,
    "set_per_process_memory_fraction": lambda share, device=None: setattr(
        card(device), "limit_bytes", share * card(device).total_bytes
    ),
    "set_sync_debug_mode": _set_sync_debug_mode,
}


def _in_new_threads(enter: Callable[[ExitStack], None]) -> None:
    """Enter contexts in every thread that starts from here on: modes belong to the thread that entered them."""
    honest = threading.Thread.run

    def run(thread: threading.Thread) -> None:
        with ExitStack() as stack:
            enter(stack)
            honest(thread)

    threading.Thread.run = run  # type: ignore[method-assign]


def _keeping_parameters(apply: Callable[..., Any]) -> Callable[..., Any]:
    """`Module._apply` under which parameters stay the same objects when they move, as between a CPU and a GPU."""

    def applied(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return apply(module, *args, **kwargs)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    return applied


def installed() -> bool:
    return bool(cards)


def install(of: Cards | None = None) -> None:
    """Give this process cards, until it ends.

    Args:
        of: the cards; None: those that the environment names.
    """
    if installed():
        return
    of = of or Cards(**json.loads(os.environ[VARIABLE]))
    from bsearch.objectives.profiling.memory import as_cuda
    from torch.optim import optimizer

    cards.extend(Card(index, of) for index in range(of.count))
    permanent = ExitStack()
    permanent.enter_context(as_cuda.as_cuda())  # autocast without a driver, and backward passes by the walk
    for name, answer in _ANSWERS.items():
        setattr(torch.cuda, name, answer)
        if hasattr(torch.cuda.memory, name):
            setattr(torch.cuda.memory, name, answer)
    traced = as_cuda.attention

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """CUDA's attention kernels have no twin on the CPU: the plain one stands in, but for traces."""
        if not isinstance(query, CudaTensor):
            return traced(query, key, value, *args, **kwargs)
        names = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        given = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
        given |= dict(zip(names, args, strict=False)) | kwargs
        if torch.is_autocast_enabled("cuda"):
            query, key, value = (one.to(torch.get_autocast_dtype("cuda")) for one in (query, key, value))
        if given.pop("enable_gqa"):
            key, value = (one.repeat_interleave(query.size(-3) // one.size(-3), -3) for one in (key, value))
        return as_cuda._plain_attention(query, key, value, *given.values())  # type: ignore[arg-type]

    as_cuda.attention = attention
    torch.backends.cudnn.enabled = False  # BatchNorm would take kernels that the CPU does not have
    torch._C._ensureCUDADeviceGuardSet()  # one that does nothing, as fake tensors have it
    # `torch.tensor(..., device="cuda")`: made on the CPU, then moved.
    torch._C._set_only_lift_cpu_tensors(True)
    optimizer._foreach_supported_types.append(CudaTensor)  # as parameters on a GPU are
    nn.Module._apply = _keeping_parameters(nn.Module._apply)  # type: ignore[method-assign]
    Tensor.pin_memory, Tensor.is_pinned = _pin_memory, _is_pinned  # type: ignore[method-assign,assignment]
    for mode in (_Functions, _Operations):
        permanent.enter_context(mode())
    modes = (as_cuda._CudaFunctions, _Functions, _Operations)
    _in_new_threads(lambda stack: [stack.enter_context(mode()) for mode in modes] and None)
    _installed.append(permanent)


# Contexts that stay open until the process ends.
_installed: list[ExitStack] = []

# So do processes whose path holds `site`, where torch is imported.
if os.environ.get(VARIABLE):
    install()
