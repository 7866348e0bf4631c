# SPDX-License-Identifier: Apache-2.0
"""Adapter states as plain dictionaries of tensors, and pure functions on them.

A *state* holds the tensors that one role (personal, local, global) trains, by their names in the ``state_dict()`` of
the single model. A *stack* is the same dictionary with a leading client axis C on every tensor.
"""

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)

State = dict[str, Tensor]
WITHOUT_DOUBLE = {"mps"}
"""Device types without double precision."""


class Factors(NamedTuple):
    """Names of a layer's two LoRA factors (Hu et al., ICLR 2022), which add ``scale`` · up · down to its weight.

    Attributes:
        down: Name of A, of shape (r, in), or (r, in, height, width) in a convolution.
        up: Name of B, of shape (out, r), or (out, r, 1, 1) in a convolution.
        scale: Factor s of the product.
        weight: Name in the layer of the weight to which the product is added.
    """

    down: str
    up: str
    scale: float
    weight: str = "weight"

    @property
    def base(self) -> str:
        """Full name of the weight to which the product is added.

        >>> Factors("fc.lora_A.default.weight", "fc.lora_B.default.weight", 2.0).base
        'fc.base_layer.weight'
        """
        return f"{self.down.partition('.lora_A.')[0]}.base_layer.{self.weight}"


class Merged(nn.Parameter):
    """A weight in states that no client trains, and into which the server merges the clients' updates.

    It requires gradients like trained parameters, so that it is not taken for a constant. The rows of a stack are
    usually views of one tensor, without copies.
    """


def parameter_keys(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters that clients may train, in the model's order."""
    keys = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not isinstance(parameter, Merged):
            keys.append(name)
    return tuple(keys)


def trained_keys(model: nn.Module) -> tuple[str, ...]:
    """Return the names that make up a state: trainable parameters, and persistent buffers of modules that have some.

    The running statistics of a trained BatchNorm thus belong to the state; those of a frozen one do not. Weights that
    are :class:`Merged` are included. A parameter that several layers share is listed under its first name.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).requires_grad_(False)
    >>> _ = model[1].requires_grad_(True)
    >>> trained_keys(model)
    ('1.weight', '1.bias', '1.running_mean', '1.running_var', '1.num_batches_tracked')
    """
    keys = []
    tied = tied_names(model)
    for path, module in model.named_modules():
        path_prefix = f"{path}." if path else ""
        names = []
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and f"{path_prefix}{name}" not in tied:
                names.append(name)
        if names:
            persistent = set(module.state_dict().keys())
            names += [name for name, _ in module.named_buffers(recurse=False) if name in persistent]
        keys += [f"{path_prefix}{name}" for name in names]
    return tuple(keys)


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the additional names of parameters that several modules share, ``{name: first name}``.

    A module that occurs in several places is listed under its first name only, as in ``named_modules()``.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> model[1].weight = model[0].weight
    >>> tied_names(model)
    {'1.weight': '0.weight'}
    """
    first_name_of: dict[int, str] = {}
    tied = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{path}.{name}".lstrip(".")
            if id(parameter) in first_name_of:
                tied[full_name] = first_name_of[id(parameter)]
            else:
                first_name_of[id(parameter)] = full_name
    return tied


def get_state(model: nn.Module) -> State:
    """Return a detached copy of the tensors of :func:`trained_keys`."""
    tensors = model.state_dict()
    return {key: tensors[key].detach().clone() for key in trained_keys(model)}


def add_to_digest(digest: "hashlib._Hash", name: str, value: Tensor) -> None:
    """Add the name and the values of a tensor to a digest."""
    digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
    # Tensors are hashed as bytes, since NumPy has no bfloat16.
    digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def set_state(model: nn.Module, state: State) -> None:
    """Copy a state into a model in place; raise a KeyError if one of its names is not in the model."""
    # The tensors of a state_dict() share memory with those of the model.
    tensors = model.state_dict()
    with torch.no_grad():
        for key, value in state.items():
            if key not in tensors:
                raise KeyError(f"the model has no tensor named {key!r}; pass a state of this backbone and adapter")
            tensors[key].copy_(value)


def train_mode(model: nn.Module) -> nn.Module:
    """Put a model in training mode, but keep every frozen normalisation layer in evaluation mode.

    In training mode, each forward pass would update the statistics of a frozen BatchNorm, which belong to no state.
    """
    model.train()
    for module in model.modules():
        if _has_running_statistics(module) and not _is_trained(module):
            module.eval()
    return model


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """Return the norms that use the statistics of a batch, in training mode or always.

    These are trained norms with running statistics, and norms without any. A frozen norm with running statistics stays
    in evaluation mode (:func:`train_mode`).
    """
    norms = []
    for module in model.modules():
        if not _has_running_statistics(module):
            continue
        keeps_none = module._buffers["running_mean"] is None
        if _is_trained(module) or keeps_none:
            norms.append(module)
    return norms


def _has_running_statistics(module: nn.Module) -> bool:
    """Return whether a module is a norm that can have running statistics; they may be None."""
    # hasattr() would not do: PEFT's wrappers forward it to the module that they wrap, and would count as norms too.
    return "running_mean" in module._buffers


def _is_trained(module: nn.Module) -> bool:
    """Return whether a module has trainable parameters, apart from those of its children."""
    return any(parameter.requires_grad for parameter in module.parameters(recurse=False))


def copy_module(module: ModuleT, replacement: Callable[[Tensor], Tensor | None]) -> ModuleT:
    """Copy a module, with other tensors in place of some of its parameters and buffers.

    Args:
        module: The module.
        replacement: Returns the tensor that takes the place of a parameter or buffer, which may be the same one, so
            that module and copy share it; None to copy it.

    >>> from torch import nn
    >>> layer = nn.Linear(1, 1)
    >>> copy_module(layer, lambda tensor: tensor).weight is layer.weight
    True
    """
    # deepcopy takes what is in its memo, by id, for copied already.
    memo: dict[int, Any] = {}
    for tensor in chain(module.parameters(), module.buffers()):
        other = replacement(tensor)
        if other is not None:
            memo[id(tensor)] = other
    return copy.deepcopy(module, memo)


def clone(state: State) -> State:
    """Return a state with every tensor copied and detached."""
    return {key: value.detach().clone() for key, value in state.items()}


def stack(states: Sequence[State]) -> State:
    """Stack the states of C clients into one with a leading client axis.

    >>> stack([{"w": torch.zeros(2)}, {"w": torch.ones(2)}])["w"].shape
    torch.Size([2, 2])
    """
    return {key: torch.stack([state[key] for state in states]) for key in states[0]}


def unstack(stacked: State) -> list[State]:
    """Split a stack into one state (a view) per client.

    >>> [s["w"].item() for s in unstack({"w": torch.tensor([1.0, 2.0])})]
    [1.0, 2.0]
    """
    if not stacked:
        return []
    states = []
    for index in range(stack_size(stacked)):
        states.append({key: value[index] for key, value in stacked.items()})
    return states


def expand(state: State, num_clients: int) -> State:
    """View one state as a stack of ``num_clients`` equal ones, without copying.

    >>> expand({"w": torch.ones(3)}, 4)["w"].shape
    torch.Size([4, 3])
    """
    return {key: value.unsqueeze(0).expand(num_clients, *value.shape) for key, value in state.items()}


def gather(stacked: State, clients: Sequence[int]) -> State:
    """Return copies of the rows of some clients of a stack, without waiting for a GPU."""
    rows = torch.tensor(clients, dtype=torch.int64)
    # The indices are copied once to each device, not once for each tensor.
    rows_on_device: dict[torch.device, Tensor] = {}
    gathered = {}
    for key, value in stacked.items():
        if value.device not in rows_on_device:
            rows_on_device[value.device] = to_device_async(rows, value.device)
        gathered[key] = value[rows_on_device[value.device]]
    return gathered


def prefix(stacked: State, num_clients: int) -> State:
    """Return views of the first ``num_clients`` rows of a stack."""
    return {key: value[:num_clients] for key, value in stacked.items()}


def select(state: State, keys: Iterable[str]) -> State:
    """Return the tensors of a state that are among ``keys``, in the order of the state.

    >>> list(select({"a": torch.ones(1), "b": torch.ones(1)}, {"b"}))
    ['b']
    """
    selected_keys = set(keys)
    return {key: value for key, value in state.items() if key in selected_keys}


def without(state: State, keys: Iterable[str]) -> State:
    """Return the tensors of a state that are not among ``keys``, in the order of the state.

    >>> list(without({"a": torch.ones(1), "b": torch.ones(1)}, {"b"}))
    ['a']
    """
    omitted_keys = set(keys)
    return {key: value for key, value in state.items() if key not in omitted_keys}


def to_device(state: State, device: torch.device) -> State:
    """Return a state on ``device``; tensors already there are not copied."""
    return {key: value.to(device) for key, value in state.items()}


def strides_of(state: State) -> dict[str, list[int]]:
    """Return the strides of the tensors that are not contiguous, such as convolutions' weights in channels_last.

    Files and messages do not store the memory layout, but the last bits of a network's outputs depend on it.

    >>> strides_of({"a": torch.ones(2, 3), "b": torch.ones(2, 3).T})
    {'b': [1, 3]}
    """
    strides_by_key = {}
    for key, value in state.items():
        # The strides that a copy would have, which has no gaps between its elements.
        strides = torch.empty_like(value, device="meta").stride()
        contiguous_strides = torch.empty(value.shape, device="meta").stride()
        if strides != contiguous_strides:
            strides_by_key[key] = list(strides)
    return strides_by_key


def laid_out(state: State, strides: Mapping[str, Sequence[int]]) -> State:
    """Copy a state into the memory layout that :func:`strides_of` returned.

    Raises:
        ValueError: If there are strides for a tensor that is not in the state, or strides that leave gaps or overlap.

    >>> laid_out({"b": torch.ones(3, 2)}, {"b": [1, 3]})["b"].stride()
    (1, 3)
    """
    for key, key_strides in strides.items():
        if key not in state:
            raise ValueError(f"strides of {key!r}, but there is no such tensor")
        if not _is_dense(state[key].shape, key_strides):
            raise ValueError(f"strides {list(key_strides)} of {key!r} do not match its shape {tuple(state[key].shape)}")
    copies: State = {}
    for key, value in state.items():
        contiguous_strides = torch.empty(value.shape, device="meta").stride()
        # Tensors without an entry are contiguous, and so is a scalar, whose strides are an empty list.
        key_strides = strides.get(key) or contiguous_strides
        copy = torch.empty_strided(value.shape, key_strides, dtype=value.dtype, device=value.device)
        copies[key] = copy.copy_(value)
    return copies


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether a tensor with this shape and these strides has neither gaps nor overlaps in memory."""
    if len(strides) != len(shape):
        return False
    # From the smallest stride to the largest: each must be the number of elements that the axes before it span.
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            # The stride of an axis of size 1 is never used.
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def to_device_async(value: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device, without waiting for a GPU's pending work."""
    if torch.device(device).type == "cuda" and value.device.type == "cpu":
        return value.pin_memory().to(device, non_blocking=True)
    return value.to(device)


def double(value: Tensor) -> Tensor:
    """Convert to double precision, or to single if the device has no double.

    A sum in double precision that is rounded afterwards does not depend on the order in which ranks add.
    """
    return value.to(double_dtype(value.device))


def double_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 if the device has no double precision."""
    if device.type in WITHOUT_DOUBLE:
        return torch.float32
    return torch.float64


def bytes_of(value: Tensor) -> memoryview:
    """Return the bytes of a tensor, in the order of its elements.

    >>> list(bytes_of(torch.tensor([1, 256], dtype=torch.int16)))
    [1, 0, 0, 1]
    """
    flat = value.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def holds(dtype: torch.dtype, value: int) -> bool:
    """Return whether an integer is one of a type's values.

    >>> holds(torch.uint8, 255), holds(torch.uint8, -1)
    (True, False)
    """
    limits = torch.iinfo(dtype)
    return limits.min <= value <= limits.max


def loses_digits(values: Tensor) -> bool:
    """Return whether numbers (N,) that differ can no longer be told apart well in float32.

    That is the case if rounding changes them by more than a thousandth of their standard deviation.

    >>> loses_digits(torch.tensor([1.7e12, 1.7e12 + 1], dtype=torch.float64))
    True
    >>> loses_digits(torch.tensor([36.6, 41.3], dtype=torch.float64))
    False
    """
    exact = values.double()
    if len(exact) < 2 or not exact.isfinite().all():
        return False
    std = float(exact.std(correction=0))
    rounding = float((exact.float().double() - exact).abs().max())
    return rounding > 1e-3 * std > 0


def images_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the dtype in which a model takes floating-point images: float64 if any of its weights are.

    None if it has weights in half precision, since it then converts between dtypes by itself.

    >>> images_dtype(nn.Linear(2, 2)), images_dtype(nn.Linear(2, 2).double())
    (torch.float32, torch.float64)
    """
    dtypes = {value.dtype for value in model.parameters() if value.is_floating_point()}
    if torch.float64 in dtypes:
        # An adapter in single precision converts what its layer receives.
        return torch.float64
    return torch.float32 if dtypes <= {torch.float32} else None


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which products are computed in the dtype of their tensors, whatever the run's precision."""
    # The device "meta" has no autocast, and torch.autocast raises an error for it.
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def rank_axes(factors: Iterable[Factors]) -> dict[str, int]:
    """Return the axis of each factor, by name, that has the rank as its size: 0 for A and 1 for B."""
    axes = {}
    for pair in factors:
        axes[pair.down] = 0
        axes[pair.up] = 1
    return axes


def cut_ranks(stacked: State, factors: Iterable[Factors], lora_ranks: Tensor) -> State:
    """Set the rows of A and the columns of B beyond each client's rank to zero.

    A name may have a prefix that ends in "/", which is ignored. Tensors that are not factors are returned as they are.

    Args:
        stacked: States (C, ...).
        factors: Names of the factors.
        lora_ranks: Rank (C,) of each client.

    >>> pair = Factors("a", "b", 1.0)
    >>> cut_ranks({"a": torch.ones(2, 3, 1)}, [pair], torch.tensor([1, 2]))["a"].flatten(1).tolist()
    [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]
    """
    axes = rank_axes(factors)
    cut = dict(stacked)
    for key, value in stacked.items():
        axis = axes.get(key.rpartition("/")[2])
        if axis is not None:
            cut[key] = value.masked_fill(_mask_beyond_ranks(value, axis, lora_ranks), 0)
    return cut


def narrowed(state: State, factors: Iterable[Factors], rank: int) -> State:
    """Remove the rows of A and the columns of B beyond a rank from a state without a client axis.

    These are the parts that :func:`cut_ranks` sets to zero.
    """
    axes = rank_axes(factors)
    narrow_state = dict(state)
    for key, value in state.items():
        axis = axes.get(key.rpartition("/")[2])
        if axis is not None:
            narrow_state[key] = value.narrow(axis, 0, min(rank, value.shape[axis]))
    return narrow_state


def widened(value: Tensor, shape: Sequence[int]) -> Tensor:
    """Pad a tensor with zeros at the end of each axis, up to a ``shape``.

    >>> widened(torch.ones(1, 2), (2, 3)).tolist()
    [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    """
    padded = value.new_zeros(shape)
    corner = tuple(slice(size) for size in value.shape)
    padded[corner] = value
    return padded


def _mask_beyond_ranks(value: Tensor, axis: int, lora_ranks: Tensor) -> Tensor:
    """Return a mask of the places beyond each client's rank, which broadcasts over a stack.

    Args:
        value: Stack (C, ...) of a factor.
        axis: Axis of the rank in one client's tensor.
        lora_ranks: Rank (C,) of each client.
    """
    stacked_axis = 1 + axis
    places = torch.arange(value.shape[stacked_axis], device=value.device)
    is_beyond = places >= lora_ranks.to(value.device).view(-1, 1)  # (C, places)
    # All other axes have size 1.
    shape = [1] * value.dim()
    shape[0] = len(lora_ranks)
    shape[stacked_axis] = len(places)
    return is_beyond.view(shape)


def per_client(values: Tensor, stack: Tensor) -> Tensor:
    """View one value (C,) per client as (C, 1, ...), so that it broadcasts over a stack (C, ...).

    >>> per_client(torch.ones(2), torch.ones(2, 3, 4)).shape
    torch.Size([2, 1, 1])
    """
    trailing_axes = stack.dim() - 1
    return values.view([-1] + [1] * trailing_axes)


def stack_size(stacked: State) -> int:
    """Return C, the number of clients in a non-empty stack.

    >>> stack_size({"w": torch.zeros(3, 2)})
    3
    """
    return len(next(iter(stacked.values())))


def device_of(state: State) -> torch.device:
    """Return the device of a non-empty state whose tensors are all on one device."""
    return next(iter(state.values())).device


def numel(state: State) -> int:
    """Count the scalars in a state."""
    return sum(value.numel() for value in state.values())


def megabytes(state: State) -> float:
    """Return the size of a state in megabytes (10**6 bytes) in its dtypes."""
    return sum(value.numel() * value.element_size() for value in state.values()) / 1e6


def is_finite(state: State) -> bool:
    """Return whether no tensor of a state contains NaN or infinity; all must be on one device."""
    if not state:
        return True
    finite = [value.isfinite().all() for value in state.values()]
    # The values are stacked on the device, so that the host waits for it only once.
    return bool(torch.stack(finite).all())


def as_matrix(stack: Tensor) -> Tensor:
    """View a stack (C, ...) as a matrix (C, N) with one row per client, or copy it if its strides require that.

    >>> as_matrix(torch.ones(2, 3, 4)).shape, as_matrix(torch.ones(2)).shape
    (torch.Size([2, 12]), torch.Size([2, 1]))
    """
    if stack.dim() == 1:
        return stack.unsqueeze(1)
    return stack.flatten(1)


BLOCK_SIZE = 2**16
"""Number of elements of a stack that are converted to double precision at a time on a CPU; they take 0.5 MB.

A client's sums, differences and squares then fit a cache of 2 MB beside them. With twice as many the sums of a single
client take longer, and with fewer the calls do.
"""


def column_blocks(matrix: Tensor) -> Iterator[slice]:
    """Yield blocks of the columns of a matrix (C, N) that fit a CPU's caches; on a GPU there is one block."""
    rows, columns = matrix.shape
    size = max(1, columns)
    if matrix.device.type == "cpu":
        size = max(1, BLOCK_SIZE // max(1, rows))
    for start in range(0, columns, size):
        yield slice(start, min(start + size, columns))


def finite_rows(stack: Tensor) -> Tensor:
    """Return a mask (C,) of the rows of a stack (C, ...) that contain neither NaN nor infinity."""
    rows = as_matrix(stack)
    if not stack.is_floating_point() or not rows.shape[1]:
        return torch.ones(len(stack), dtype=torch.bool, device=stack.device)
    if stack.device.type == "cpu":
        # A sum takes a tenth of the time. It is NaN or infinite if any element is, and possibly for huge finite ones.
        finite_sums = rows.sum(1).isfinite()
        if finite_sums.all():
            return finite_sums
    # The largest magnitude is NaN or infinite if any element is. Unlike isfinite(), this allocates no mask of the
    # stack.
    largest: Tensor = torch.linalg.vector_norm(rows, math.inf, dim=1)
    return largest.isfinite()
