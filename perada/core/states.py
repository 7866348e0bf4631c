# SPDX-License-Identifier: Apache-2.0
"""Adapter states as plain dictionaries of tensors, and pure functions on them.

A *state* holds what one role (personal, local, global) trains: ``{name in the single model: tensor}``. A *stack* is the
same dictionary with a leading client axis C on every tensor. Names are those of the single model's ``state_dict()``.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

State = dict[str, Tensor]


class Factors(NamedTuple):
    """Names of a layer's two factors of LoRA (Hu et al., ICLR 2022), which add ``scale`` · up · down to its weight.

    Of a linear layer they are (r, in) and (out, r), of a convolution (r, in, height, width) and (out, r, 1, 1).
    """

    down: str
    up: str
    scale: float

    @property
    def base(self) -> str:
        """Name of that weight.

        >>> Factors("fc.lora_A.default.weight", "fc.lora_B.default.weight", 2.0).base
        'fc.base_layer.weight'
        """
        return f"{self.down.partition('.lora_A.')[0]}.base_layer.weight"


class Merged(nn.Parameter):
    """A weight that is a part of states, into which the server merges what clients trained, and which no client trains.

    It requires gradients like what is trained, so that nothing takes it for a constant. The rows of a stack are usually
    views of one tensor, and are not copied.
    """


def parameter_keys(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters of ``model`` that clients may train, in the model's order."""
    named = model.named_parameters()
    return tuple(name for name, value in named if value.requires_grad and not isinstance(value, Merged))


def trained_keys(model: nn.Module) -> tuple[str, ...]:
    """Return the names that make up a state: trainable parameters, and the buffers of the modules that own one.

    Weights that are :class:`Merged` are among them. A parameter of several layers has the first of its names. The
    running statistics of a trained BatchNorm thus belong to the state; those of a frozen one do not.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).requires_grad_(False)
    >>> _ = model[1].requires_grad_(True)
    >>> trained_keys(model)
    ('1.weight', '1.bias', '1.running_mean', '1.running_var', '1.num_batches_tracked')
    """
    keys = []
    tied = tied_names(model)
    for path, module in model.named_modules():
        names = [
            name
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad and f"{path}.{name}".lstrip(".") not in tied
        ]
        if names:
            persistent = set(module.state_dict().keys())
            names += [name for name, _ in module.named_buffers(recurse=False) if name in persistent]
        keys += [f"{path}.{name}" if path else name for name in names]
    return tuple(keys)


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further names of parameters that several modules share, ``{name: first name}``.

    A module that stands in several places has its first name only, as in ``named_modules()``.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> model[1].weight = model[0].weight
    >>> tied_names(model)
    {'1.weight': '0.weight'}
    """
    first: dict[int, str] = {}
    tied = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{path}.{name}".lstrip(".")
            if id(parameter) in first:
                tied[full_name] = first[id(parameter)]
            else:
                first[id(parameter)] = full_name
    return tied


def get_state(model: nn.Module) -> State:
    """Return a detached copy of the trained part of ``model``."""
    full = model.state_dict()
    return {key: full[key].detach().clone() for key in trained_keys(model)}


def set_state(model: nn.Module, state: State) -> None:
    """Copy ``state`` into ``model`` in place; raise a KeyError if one of its names is not in the model."""
    full = model.state_dict()
    with torch.no_grad():
        for key, value in state.items():
            if key not in full:
                raise KeyError(f"the model has no tensor named {key!r}; give a state of this backbone and adapter")
            full[key].copy_(value)


def train_mode(model: nn.Module) -> nn.Module:
    """Put ``model`` in training mode, but keep every frozen normalisation layer in evaluation mode.

    A frozen BatchNorm in training mode would drift with every forward pass without being part of any state.
    """
    model.train()
    for module in model.modules():
        if _has_running_statistics(module) and not _is_trained(module):
            module.eval()
    return model


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """List the norms that use the statistics of a batch in training mode, or always.

    These are trained norms with running statistics, and norms that keep none. A frozen norm with running statistics
    stays in evaluation mode (:func:`train_mode`).
    """
    return [
        module
        for module in model.modules()
        if _has_running_statistics(module) and (_is_trained(module) or module._buffers["running_mean"] is None)
    ]


def _has_running_statistics(module: nn.Module) -> bool:
    """Whether a module is a norm with a place for running statistics, which may be None."""
    # Not hasattr: PEFT's wrappers answer for the module that they wrap, and would take it along into eval().
    return "running_mean" in module._buffers


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters(recurse=False))


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
    size = len(next(iter(stacked.values()))) if stacked else 0
    return [{key: value[index] for key, value in stacked.items()} for index in range(size)]


def expand(state: State, clients: int) -> State:
    """View one state as a stack of ``clients`` equal ones, without copying.

    >>> expand({"w": torch.ones(3)}, 4)["w"].shape
    torch.Size([4, 3])
    """
    return {key: value.unsqueeze(0).expand(clients, *value.shape) for key, value in state.items()}


def gather(stacked: State, clients: Sequence[int]) -> State:
    """Copy the rows of ``clients`` out of a stack; the host does not wait for a GPU."""
    rows = torch.tensor(clients, dtype=torch.int64)
    places = {device: to_device_async(rows, device) for device in {value.device for value in stacked.values()}}
    return {key: value[places[value.device]] for key, value in stacked.items()}


def prefix(stacked: State, clients: int) -> State:
    """View the first ``clients`` rows of a stack."""
    return {key: value[:clients] for key, value in stacked.items()}


def partition(state: State, keys: Iterable[str]) -> tuple[State, State]:
    """Split a state into the part named by ``keys`` and the rest.

    >>> partition({"a": torch.ones(1), "b": torch.ones(1)}, {"b"})[0].keys()
    dict_keys(['b'])
    """
    wanted = set(keys)
    inside = {key: value for key, value in state.items() if key in wanted}
    return inside, {key: value for key, value in state.items() if key not in wanted}


def to_device(state: State, device: torch.device) -> State:
    """Return a state on ``device``; tensors that are there already are not copied."""
    return {key: value.to(device) for key, value in state.items()}


def strides_of(state: State) -> dict[str, list[int]]:
    """Strides of the tensors that are not laid out row by row, such as weights of convolutions in channels_last.

    The last bits of what a network computes depend on how its weights lie in memory, which files and messages do not
    keep.

    >>> strides_of({"a": torch.ones(2, 3), "b": torch.ones(2, 3).T})
    {'b': [1, 3]}
    """
    found = {}
    for key, value in state.items():
        strides = torch.empty_like(value, device="meta").stride()  # of a copy, which has no gaps
        if strides != torch.empty(value.shape, device="meta").stride():
            found[key] = list(strides)
    return found


def laid_out(state: State, strides: Mapping[str, Sequence[int]]) -> State:
    """A copy of a state whose tensors lie in memory as :func:`strides_of` said.

    Raises:
        ValueError: If strides are of a tensor that is not in the state, or would leave gaps or overlap.

    >>> laid_out({"b": torch.ones(3, 2)}, {"b": [1, 3]})["b"].stride()
    (1, 3)
    """
    for key, own in strides.items():
        if key not in state:
            raise ValueError(f"strides of {key!r}, and there is no such tensor")
        if not _fills(state[key].shape, own):
            raise ValueError(f"strides {list(own)} of {key!r}, whose shape is {tuple(state[key].shape)}")
    found = {}
    for key, value in state.items():
        own = strides.get(key) or torch.empty(value.shape, device="meta").stride()
        found[key] = torch.empty_strided(value.shape, own, dtype=value.dtype, device=value.device).copy_(value)
    return found


def _fills(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor with these strides has each place in its memory once."""
    if len(strides) != len(shape):
        return False
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:  # any stride leads nowhere
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def to_device_async(value: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to ``device``. The host does not wait until a GPU has done all that it was asked before."""
    if torch.device(device).type == "cuda" and value.device.type == "cpu":
        return value.pin_memory().to(device, non_blocking=True)
    return value.to(device)


def rank_axes(factors: Iterable[Factors]) -> dict[str, int]:
    """The axis along which a factor has its rank, by name: that of A's rows, and that of B's columns."""
    return {name: axis for pair in factors for axis, name in enumerate((pair.down, pair.up))}


def cut_ranks(stacked: State, factors: Iterable[Factors], ranks: Tensor) -> State:
    """A stack whose clients have LoRA of ``ranks`` (C,): rows of A and columns of B from there on are zero.

    So are those of tensors that are named after a factor, behind a prefix that ends in "/". All else is as it was.

    >>> pair = Factors("a", "b", 1.0)
    >>> cut_ranks({"a": torch.ones(2, 3, 1)}, [pair], torch.tensor([1, 2]))["a"].flatten(1).tolist()
    [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]
    """
    axes = rank_axes(factors)
    return {
        key: value
        if (axis := axes.get(key.rpartition("/")[2])) is None
        else value.masked_fill(_beyond(value, axis, ranks), 0)
        for key, value in stacked.items()
    }


def narrowed(state: State, factors: Iterable[Factors], rank: int) -> State:
    """A state (no client axis) without what :func:`cut_ranks` makes zero, whose tensors are smaller then."""
    axes = rank_axes(factors)
    narrow_state = dict(state)
    for key, value in state.items():
        if (axis := axes.get(key.rpartition("/")[2])) is not None:
            narrow_state[key] = value.narrow(axis, 0, min(rank, value.shape[axis]))
    return narrow_state


def widened(value: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor of another ``shape``, with zeros behind its own numbers along each axis.

    >>> widened(torch.ones(1, 2), (2, 3)).tolist()
    [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    """
    padded = value.new_zeros(shape)
    padded[tuple(map(slice, value.shape))] = value
    return padded


def _beyond(value: Tensor, axis: int, ranks: Tensor) -> Tensor:
    """Where a stack (C, ...) is beyond the ``ranks`` (C,) of its clients, counted along an axis of one client's."""
    places = torch.arange(value.shape[1 + axis], device=value.device)
    outside = places >= ranks.to(value.device).view(-1, 1)
    return outside.view(len(outside), *[1] * axis, -1, *[1] * (value.dim() - axis - 2))


def per_client(values: Tensor, stack: Tensor) -> Tensor:
    """View values (C,) of clients so that they multiply a stack (C, ...).

    >>> per_client(torch.ones(2), torch.ones(2, 3, 4)).shape
    torch.Size([2, 1, 1])
    """
    return values.view(-1, *[1] * (stack.dim() - 1))


def stack_size(stacked: State) -> int:
    """Return C, the number of clients in a stack that has at least one tensor.

    >>> stack_size({"w": torch.zeros(3, 2)})
    3
    """
    return len(next(iter(stacked.values())))


def device_of(state: State) -> torch.device:
    """Return the device of a state that has at least one tensor, and all of them there."""
    return next(iter(state.values())).device


def numel(state: State) -> int:
    """Number of scalars in a state."""
    return sum(value.numel() for value in state.values())


def megabytes(state: State) -> float:
    """Size of a state in megabytes (10**6 bytes) in its own number format."""
    return sum(value.numel() * value.element_size() for value in state.values()) / 1e6


def is_finite(state: State) -> bool:
    """Whether a state, all on one device, holds neither a NaN nor an infinity."""
    return not state or bool(torch.stack([value.isfinite().all() for value in state.values()]).all())
