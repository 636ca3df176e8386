"""Run a training step on fake tensors as CUDA would run it, on a machine that may have no GPU.

Where a step's memory goes depends on the device: CUDA has its own autocast rules and attention kernels. Fake tensors can claim
to lie on a GPU, and their operations then follow CUDA's rules. Three things still ask for a driver, and are done here instead:
autocast asks whether there is one, attention asks the device which kernel to use, and autograd's engine asks for a stream. So
the graph of a backward pass is walked in Python, in the engine's order, with the engine's rules of when a tensor dies.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from ....spaces.errors import ProfilingError

# Flash attention takes heads up to this size; sizes are padded to a multiple of 8.
_FLASH_HEAD, _HEAD_MULTIPLE = 256, 8
_HALF = (torch.float16, torch.bfloat16)

# Kernels that update parameters in place and allocate nothing.
_FUSED = tuple(
    getattr(torch, name)
    for name in ("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_")
    if hasattr(torch, name)
)


# Numbers of backward passes, apart from those of autograd's engine.
_TASKS = itertools.count(1 << 40)

_SCALED_DOT_PRODUCT_ATTENTION = F.scaled_dot_product_attention


class _InOrder:
    """Stands in for a stream or an event: fake operations run one after another."""

    stream_id = device_index = device_type = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., _InOrder]:
        return lambda *_, **__: self

    def __enter__(self) -> _InOrder:
        return self

    def __exit__(self, *_: object) -> None: ...


# What `fully_shard` asks of the driver.
_DRIVER: dict[str, Any] = {
    "Stream": _InOrder,
    "Event": _InOrder,
    "stream": _InOrder,
    "current_stream": _InOrder,
    "current_device": lambda: 0,
    "device_count": lambda: 1,
    "is_initialized": lambda: True,
    "set_device": lambda device: None,
}


@contextmanager
def as_cuda() -> Iterator[None]:
    """Context in which fake tensors on `cuda` train without a driver: autocast, attention, backward, fused optimizers."""
    from torch.cuda.amp import common

    with ExitStack() as stack:
        stack.enter_context(patch.object(common, "amp_definitely_not_available", lambda: False))
        stack.enter_context(patch.object(torch.cuda, "is_bf16_supported", lambda *_, **__: True))
        # The fused inference kernel of transformer layers knows no fake tensors.
        fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        # By name too: a mode does not see what functions of this module call, such as `multi_head_attention_forward`.
        stack.enter_context(patch.object(F, "scaled_dot_product_attention", _attention_of_device))
        # Some libraries have torch tell it by the number of devices, of which there is one below: torch would ask its driver.
        available = torch.cuda.is_available()
        stack.enter_context(patch.object(torch.cuda, "is_available", lambda: available))
        for name, stand_in in _DRIVER.items():
            stack.enter_context(patch.object(torch.cuda, name, stand_in))
        stack.enter_context(_CudaFunctions())
        yield


def move_to_fake_cuda(model: nn.Module) -> nn.Module:
    """Replace a fake model's parameters and buffers by ones on `cuda`, in place; `Module.to` would ask for a driver."""
    moved: dict[int, Tensor] = {}

    def on_cuda(tensor: Tensor) -> Tensor:
        if id(tensor) not in moved:
            with torch.no_grad():
                copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
            moved[id(tensor)] = (
                nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy
            )
        return moved[id(tensor)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = on_cuda(tensor)  # type: ignore[assignment]
        if isinstance(module.__dict__.get("_device"), torch.device):
            module.__dict__["_device"] = torch.device("cuda")  # a LightningModule's `self.device`
        module.__dict__.pop("_flat_weights", None)
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()
    return model


class _CudaFunctions(TorchFunctionMode):
    """Sends what would ask for a driver to code that does not."""

    def __init__(self) -> None:
        super().__init__()
        self._hooks: _Hooks = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _SCALED_DOT_PRODUCT_ATTENTION:
            return _attention_of_device(*args, **kwargs)
        if func is Tensor.backward and args[0].is_cuda:
            hooks, self._hooks = self._hooks, {}
            return _tensor_backward(hooks, *args, **kwargs)
        if func is torch.autograd.grad and args[0][0].is_cuda:
            hooks, self._hooks = self._hooks, {}
            return _gradients(hooks, *args, **kwargs)
        if func is Tensor.register_hook and args[0].grad_fn is not None:
            hook = args[1] if len(args) > 1 else kwargs["hook"]
            self._hooks.setdefault((args[0].grad_fn._sequence_nr(), args[0].output_nr), []).append(hook)
        if func in _FUSED:
            return None
        return func(*args, **kwargs)


def _tensor_backward(
    hooks: _Hooks,
    loss: Tensor,
    gradient: Tensor | None = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    if create_graph or inputs is not None:
        raise NotImplementedError("backward(create_graph=True) and backward(inputs=...) cannot be traced")
    backward(
        loss,
        torch.ones_like(loss) if gradient is None else gradient,
        retain_graph=bool(retain_graph),
        hooks=hooks,
    )


def _gradients(
    hooks: _Hooks, losses: Sequence[Tensor], inputs: Sequence[Tensor], *_: Any, **__: Any
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad` of one scalar with respect to leaves, of which some may be unused."""
    (loss,) = losses
    before = [leaf.grad for leaf in inputs]
    for leaf in inputs:
        leaf.grad = None
    backward(loss, torch.ones_like(loss), hooks=hooks)
    found = tuple(leaf.grad for leaf in inputs)
    for leaf, gradient in zip(inputs, before, strict=True):
        leaf.grad = gradient
    return found


def _attention_of_device(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    function = attention if query.is_cuda else _SCALED_DOT_PRODUCT_ATTENTION
    return function(query, *args, **kwargs)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention of (..., heads, length, size) by the kernel that a GPU of compute capability 8.0 or newer would choose.

    Flash attention for half precision without a mask, else the memory-efficient kernel; the plain one where neither applies.
    Hopper prefers cuDNN's for half precision, which keeps as many bytes as flash attention.
    """
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = (
            tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in (query, key, value)
        )
    if enable_gqa:
        key, value = (
            tensor.repeat_interleave(query.size(-3) // tensor.size(-3), -3) for tensor in (key, value)
        )
    size = query.size(-1)
    half = query.dtype in _HALF
    plain = query.dim() != 4 or query.dtype == torch.float64 or value.size(-1) != size
    if plain:
        return _plain_attention(query, key, value, attn_mask, dropout_p, is_causal, scale)
    scale = size**-0.5 if scale is None else scale
    if half and attn_mask is None and size <= _FLASH_HEAD:
        padding = -size % _HEAD_MULTIPLE
        if padding:
            query, key, value = (F.pad(tensor, (0, padding)) for tensor in (query, key, value))
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0][..., :size]  # type: ignore[no-any-return]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
                attn_mask.logical_not(), float("-inf")
            )
        attn_mask = attn_mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
    trains = any(tensor.requires_grad for tensor in (query, key, value)) and torch.is_grad_enabled()
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, trains, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]


def _plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    math_attention = torch.ops.aten._scaled_dot_product_attention_math
    return math_attention(query, key, value, mask, dropout_p, is_causal, None, scale=scale)[0]  # type: ignore[no-any-return]


def backward(
    loss: Tensor, gradient: Tensor, *, retain_graph: bool = False, hooks: _Hooks | None = None
) -> None:
    """`loss.backward(gradient)` by walking the graph in Python, with the memory of autograd's engine.

    Nodes run when all their dependants have, the latest first; each is let go at once, so that what it saved dies as it does
    in the engine. Hooks of parameters run, and of other tensors those in `hooks`.
    """
    if loss.grad_fn is None:
        return
    start = [(loss.grad_fn, {loss.output_nr: gradient})]
    del gradient
    if not retain_graph:
        loss.detach_()  # else the loss would hold the whole graph
    # Activation checkpointing computes a block again once a backward pass, which it knows by the engine's number for it.
    task, engine = next(_TASKS), _Engine()
    with (
        torch.no_grad(),
        patch.object(torch._C, "_current_graph_task_id", lambda: task),
        patch.object(torch.autograd.Variable, "_execution_engine", engine),
    ):
        _walk(start, hooks or {})
        for callback in engine.callbacks:
            callback()


class _Engine:
    """Stands in for autograd's engine, which calls back at the end of a backward pass."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], None]] = []

    def queue_callback(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)


def _walk(start: list[tuple[Node, dict[int, Tensor]]], hooks: _Hooks) -> None:
    """Walk from the node in `start`, which is taken out: nothing outside holds it, or what it saved would live on."""
    root, slots = start.pop()
    dependants = _dependants(root)
    # Gradients that wait for their node, by node and by slot of its outputs.
    waiting: dict[_Key, dict[int, Tensor]] = {_key(root): slots}
    counter = itertools.count()
    ready: list[tuple[float, int, Node]] = []

    def push(node: Node) -> None:
        # Accumulating a gradient comes first; ties in the order in which nodes became ready.
        heapq.heappush(
            ready, (float("-inf") if _is_leaf(node) else -node._sequence_nr(), next(counter), node)
        )

    push(root)
    del root, slots
    while ready:
        _, _, node = heapq.heappop(ready)
        slots = waiting.pop(_key(node), {})
        if _is_leaf(node):
            if slots:
                _accumulate(node.variable, slots)  # type: ignore[attr-defined]
            continue
        for index in slots:
            for hook in hooks.get((node._sequence_nr(), index), ()):
                changed = hook(slots[index])
                if changed is not None:
                    slots[index] = changed
        edges = list(node.next_functions)
        outputs = _called(node, slots) if slots else [None] * len(edges)
        del slots, node  # here it dies, and what it saved
        for index, (target, place) in enumerate(edges):
            edges[index] = None  # type: ignore[call-overload]
            output, outputs[index] = outputs[index], None
            if target is None:
                continue
            key = _key(target)
            if output is not None:
                _add(waiting.setdefault(key, {}), place, _fitted(output, target, place))
            del output
            dependants[key] -= 1
            if not dependants[key]:
                push(target)
        del target


# Hooks of tensors, by the number of the node that made the tensor and its place among the node's outputs.
_Hooks = dict[tuple[int, int], list[Callable[[Tensor], Tensor | None]]]

# What tells nodes apart without holding them: their Python objects come and go.
_Key = int | tuple[str, int]


# Before torch 2.13 the node of an `autograd.Function` dies with the node before it, whoever holds its Python object.
_FUNCTIONS_DIE = Version(torch.__version__).release < (2, 13)


def _key(node: Node) -> _Key:
    return ("leaf", id(node.variable)) if _is_leaf(node) else node._sequence_nr()  # type: ignore[attr-defined]


def _is_leaf(node: Node) -> bool:
    return type(node).__name__ == "AccumulateGrad"


def _dependants(root: Node) -> Counter[_Key]:
    """How many edges lead to each node of the graph."""
    counts: Counter[_Key] = Counter()
    seen, stack = {_key(root)}, [root]
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is None:
                continue
            if _FUNCTIONS_DIE and isinstance(node, torch.autograd.function.BackwardCFunction):
                name = type(node).__name__.removesuffix("Backward")
                raise ProfilingError(
                    f"expected torch 2.13 or newer to trace {name}, an autograd.Function; got {torch.__version__}"
                )
            key = _key(node)
            counts[key] += 1
            if key not in seen:
                seen.add(key)
                stack.append(node)
    return counts


def _called(node: Node, slots: dict[int, Tensor]) -> list[Tensor | None]:
    """A node's outputs, one for each of its edges, for the gradients in its slots, which it is the last to hold."""
    metadata = node._input_metadata
    inputs = [slots.pop(index, None) for index in range(len(metadata))]
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        outputs = node(*inputs)  # type: ignore[operator]
        return list(outputs) if isinstance(outputs, tuple | list) else [outputs]
    # A function written in Python gets zeros for outputs without a gradient, unless it declines them, and returns a gradient
    # for each of its arguments, tensor or not.
    if getattr(node, "materialize_grads", True):
        inputs = [
            torch.zeros(like.shape, dtype=like.dtype, device=like.device) if value is None else value
            for value, like in zip(inputs, metadata, strict=True)
        ]
    returned = node.apply(*inputs)
    wanted = zip(returned if isinstance(returned, tuple) else (returned,), node.needs_input_grad, strict=True)
    gradients = iter([gradient for gradient, needed in wanted if needed])
    return [None if target is None else next(gradients) for target, _ in node.next_functions]


def _fitted(gradient: Tensor, target: Node, place: int) -> Tensor:
    """A gradient in the shape and type of the output it belongs to, as the engine makes it: summed where it was broadcast."""
    expected = target._input_metadata[place]
    shape = tuple(expected.shape)
    if tuple(gradient.shape) != shape:
        gradient = gradient.sum_to_size(shape)
    if gradient.dtype != expected.dtype:
        gradient = gradient.to(expected.dtype)
    return gradient


def _add(slots: dict[int, Tensor], place: int, gradient: Tensor) -> None:
    """Add a gradient to a slot, in place where nothing else holds the sum so far."""
    before = slots.pop(place, None)
    if before is None:
        slots[place] = gradient
    elif _is_ours(before):
        slots[place] = before.add_(gradient)
    elif _is_ours(gradient):
        slots[place] = gradient.add_(before)
    else:
        slots[place] = before + gradient


def _is_ours(tensor: Tensor) -> bool:
    """Whether nothing else holds the tensor's storage, and it has no overlapping elements."""
    storage = tensor.untyped_storage()
    # This view of the storage and the tensor's own.
    return torch._C._storage_Use_Count(storage._cdata) <= _ALONE and tensor.is_contiguous()


def _use_count_alone() -> int:
    storage = torch.empty(1).untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))


_ALONE = _use_count_alone() + 1


def _accumulate(parameter: Tensor, slots: dict[int, Tensor]) -> None:
    """Add a gradient to a parameter's, which takes it over if it is the first; then run the parameter's hooks."""
    gradient = slots.pop(0)
    for hook in (parameter._backward_hooks or {}).values():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    if parameter.grad is None:
        if gradient.is_sparse:
            parameter.grad = gradient
        elif gradient.stride() == parameter.stride() and _is_ours(gradient):
            parameter.grad = gradient.detach()
        else:
            parameter.grad = torch.empty_strided(
                parameter.shape, parameter.stride(), dtype=gradient.dtype, device=gradient.device
            ).copy_(gradient)
    elif parameter.grad.is_sparse and not gradient.is_sparse:
        parameter.grad = gradient + parameter.grad
    else:
        parameter.grad.add_(gradient)
    del gradient
    hooks: Mapping[int, Callable[[Tensor], None]] | None = getattr(
        parameter, "_post_accumulate_grad_hooks", None
    )
    for after in (hooks or {}).values():
        after(parameter)
