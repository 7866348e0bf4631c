# SPDX-License-Identifier: Apache-2.0
"""Whether a network uses what is trained in it, tried on a small batch before training.

An adapter stands around a layer and works when that layer is called. A network may read the layer's weights instead,
recompute a part of its forward pass, keep what it computed from earlier weights, or never call the layer. Such an
adapter is not trained, or is trained and then not used, and nothing fails. So what the plain network computes, and its
gradients, are compared with what it computes in other ways: through the engine, without gradients, with other weights
in between, and with the adapter merged into the weights.

All of this runs on copies that share the frozen weights. Trained parameters are moved away from their initial values,
since most adapters start as zero.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn

from perada.adapters.added import plain_name
from perada.core.seeding import generator, seeded
from perada.core.states import get_state, parameter_keys, set_state, stack, train_mode
from perada.core.text import abbreviated
from perada.engine.engine import Engine
from perada.engine.fold import without_dropout
from perada.engine.fold_check import perturbed_states
from perada.models.adapted import AdaptedModel, is_adapter_key
from perada.models.merging import WrongMergeError, check_merged, merge_adapter

ModuleT = TypeVar("ModuleT", bound=nn.Module)
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
"""How far two ways to compute the same may be apart, relative to the largest number; 0.05 in half precision."""
MOST_ROWS = 8
"""Images that are tried where one did not reach everything that is trained."""
LARGE = 3 * 64 * 64
"""Numbers in an image above which images are few."""
REMEDY = "call the layers as modules, name other layers in target_modules, or choose another adapter, such as 'head'"


@dataclass(frozen=True)
class Usage:
    """What a network does with what is trained in it.

    Attributes:
        problem: Why it cannot be trained, and what to do; ``None`` if it can.
        unused: Names of the backbone's own trained tensors that no gradient reaches, which is harmless.
        merging: Why the adapter cannot be merged into the weights although PEFT merges it; ``None`` otherwise.
    """

    problem: str | None = None
    unused: tuple[str, ...] = ()
    merging: str | None = None


def check_usage(adapted: AdaptedModel, x: Tensor, *, channels_last: bool = False) -> Usage:
    """Find out whether a network uses what is trained in it.

    Args:
        adapted: The network. It stays as it is, to the bit, and so does torch's global random stream.
        x: Prepared images (B, ...), or texts, on the network's device.
        channels_last: Whether images are run in that memory format.
    """
    parameters = dict(adapted.model.named_parameters())
    complex_keys = [key for key in parameter_keys(adapted.model) if parameters[key].is_complex()]
    if complex_keys:
        verb = "is" if len(complex_keys) == 1 else "are"
        return Usage(
            f"only real numbers can be trained, and {abbreviated(complex_keys, 3)} {verb} complex; hold the two "
            "parts in a "
            "real parameter, of which torch.view_as_complex makes a complex tensor, or choose another adapter"
        )
    trial = _Trial(adapted, x, channels_last)
    try:
        untrained, unread = trial.unused()
        problem = _unused_problem(adapted, untrained, unread)
        difference = None if problem else trial.difference()
    except Exception as error:  # whatever a network does where gradients are asked for
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return Usage(f"it cannot be trained: {reason}; {REMEDY}")
    if difference is not None and x.is_floating_point() and x.device.type != "mps":
        difference = _in_double_precision(adapted, x, channels_last, difference)
    if problem := problem or difference:
        return Usage(f"{problem}; {REMEDY}")
    return Usage(None, tuple(untrained), trial.merging_problem())


def _unused_problem(adapted: AdaptedModel, untrained: Sequence[str], unread: Sequence[str]) -> str | None:
    """Name what was chosen to be trained, but is not, or is not used in evaluation mode."""
    if essential := [key for key in untrained if _is_essential(adapted, key)]:
        return (
            f"no gradient reaches {_named(essential)}, since the network reads the weights of these layers or does not "
            "call them"
        )
    if essential := [key for key in unread if _is_essential(adapted, key)]:
        return (
            f"the network uses {_named(essential)} in training but not in evaluation mode, where it reads the weights "
            "of these layers or does not call them"
        )
    return None


def _in_double_precision(adapted: AdaptedModel, x: Tensor, channels_last: bool, difference: str) -> str | None:
    """What is left of a ``difference`` in double precision: two ways to compute the same round differently."""
    exact = replace(adapted, peft_model=copy.deepcopy(adapted.peft_model).double())
    try:
        return _Trial(exact, x.double(), channels_last).difference()
    except Exception:  # a network may name a number format
        return difference


def share_frozen(module: ModuleT) -> ModuleT:
    """Copy a module except for its frozen parameters, which the copy shares."""
    memo: dict[int, Any] = {
        id(parameter): parameter for parameter in module.parameters() if not parameter.requires_grad
    }
    return copy.deepcopy(module, memo)


class _Trial:
    """Passes through copies of a network, whose trained parameters were moved away from their initial values."""

    def __init__(self, adapted: AdaptedModel, x: Tensor, channels_last: bool) -> None:
        self.adapted, self.images, self.channels_last = adapted, x, channels_last
        self.keys = parameter_keys(adapted.model)
        self.states = perturbed_states(get_state(adapted.model), self.keys, clients=2)
        dtypes = {value.dtype for value in adapted.model.parameters() if value.is_floating_point()}
        self.tolerance = max(TOLERANCE.get(dtype, 0.05) for dtype in dtypes)
        self.x = x[:1]
        if any(key.endswith("running_var") for key in self.states[0]):
            # One image may have no statistics, and those of few pixels are close to dividing by zero.
            rows = 2 if x[0].numel() > LARGE else MOST_ROWS
            self.x = torch.cat([x, x.flip(-1)])[:rows]
        self.model = self._network()
        # Its own weights are others than the states': what is not taken from a state shows.
        others = without_dropout(share_frozen(adapted.model))
        self.engine = Engine(others, "loop", channels_last=channels_last)

    @cached_property
    def training(self) -> tuple[Tensor, dict[str, Tensor | None]]:
        """Logits (B, K) of the plain network in training mode, and their gradients by name."""
        return self._train(self.x)

    @cached_property
    def evaluation(self) -> tuple[Tensor, list[str]]:
        """Logits (B, K) of the plain network in evaluation mode, and the names of parameters that are not in them."""
        return self._evaluate(self.x)

    def unused(self) -> tuple[list[str], list[str]]:
        """Names of parameters that no gradient reaches in training, and of those that only evaluation does not use."""
        untrained = [key for key, gradient in self.training[1].items() if gradient is None]
        unread = [key for key in self.evaluation[1] if key not in untrained]
        if not untrained and not unread:
            return [], []
        # Another image may take another path through the network.
        more = self._more_images()
        gradients, absent = self._train(more)[1], self._evaluate(more)[1]
        return [key for key in untrained if gradients[key] is None], [key for key in unread if key in absent]

    def difference(self) -> str | None:
        """Describe the first way to compute the same that gives something else; ``None`` if there is none."""
        return self._difference_in_training() or self._difference_in_evaluation()

    def merging_problem(self) -> str | None:
        """Why the adapter cannot be merged into the weights although PEFT merges it."""
        peft_model = self.adapted.peft_model
        try:
            merged = merge_adapter(share_frozen(peft_model), self.states[0])
            check_merged(peft_model, merged, self.model.eval(), self._formatted(self.x))
        except WrongMergeError as error:
            return str(error)
        except NotImplementedError:
            return None
        return None

    def _difference_in_training(self) -> str | None:
        """Compare the plain network's gradients with those for the tensors of a state, as training takes them."""
        logits, expected = self.training
        state = {key: value.unsqueeze(0).clone() for key, value in self.states[0].items()}
        for key in self.keys:
            state[key].requires_grad_()
        with torch.enable_grad(), seeded(0, "usage"):
            engine_logits = self.engine.logits(state, self.x.unsqueeze(0), training=True)[0]
            gradients = _gradients(engine_logits, {key: state[key] for key in self.keys})
        wrong = self._wrong_gradients(expected, gradients)
        if not wrong and self._close(logits, engine_logits.detach()):
            return None
        logits_again, gradients_again = self._train(self.x, seed=1)
        if not torch.equal(logits_again, logits) or self._wrong_gradients(expected, gradients_again):
            return None  # it draws random numbers, so that no two passes agree
        missing = [key for key in wrong if gradients[key] is None]  # the cause, where the others are consequences
        where = f" of {_named(missing or wrong)}" if wrong else ""
        return (
            f"gradients{where} are taken at other weights than a client's: the network recomputes parts of the forward "
            "pass (turn gradient checkpointing off), or holds tensors that are neither parameters nor buffers"
        )

    def _difference_in_evaluation(self) -> str | None:
        """Compare logits in evaluation mode with and without gradients, and with other weights in between."""
        expected = self.evaluation[0]
        with torch.no_grad(), seeded(0, "usage"):
            states = stack([self.states[1], self.states[0]])
            after_another = self.engine.logits(states, self.x.expand(2, *self.x.shape))[1]
        with torch.inference_mode():
            inferred = self._plain(self.model, self.x, training=False)
        inferred = inferred.clone()  # no inference tensor
        if self._close(expected, after_another) and self._close(expected, inferred):
            return None
        if not torch.equal(self._plain(self._network(), self.x, training=False, seed=1).detach(), expected):
            return None  # it draws random numbers
        with torch.no_grad():
            without_gradients = self._plain(self._network(), self.x, training=False)
        for logits in (inferred, without_gradients):
            if not self._close(expected, logits):
                uncalled = self._not_called()
                where = f", where it does not call {abbreviated(uncalled, 3)}" if uncalled else ""
                return f"in evaluation mode {_moved(expected, logits)} without gradients{where}"
        moved = _moved(expected, after_another)
        return f"the network keeps what it computed in an earlier pass: {moved} where other weights were used before"

    def _network(self) -> nn.Module:
        """A copy of the network in the first of the states, without dropout."""
        model = without_dropout(share_frozen(self.adapted.model))
        set_state(model, self.states[0])
        return model

    def _plain(self, model: nn.Module, x: Tensor, training: bool, seed: int = 0) -> Tensor:
        """Logits (B, K) of a network that knows nothing of states."""
        (train_mode if training else nn.Module.eval)(model)
        with seeded(seed, "usage"):
            logits: Tensor = model(self._formatted(x))
        return logits

    def _formatted(self, x: Tensor) -> Tensor:
        return x.to(memory_format=torch.channels_last) if self.channels_last and x.dim() == 4 else x

    def _train(self, x: Tensor, seed: int = 0) -> tuple[Tensor, dict[str, Tensor | None]]:
        set_state(self.model, self.states[0])  # training moves running statistics
        with torch.enable_grad():
            logits = self._plain(self.model, x, training=True, seed=seed)
            parameters = dict(self.model.named_parameters())
            gradients = _gradients(logits, {key: parameters[key] for key in self.keys})
        return logits.detach(), gradients

    def _evaluate(self, x: Tensor) -> tuple[Tensor, list[str]]:
        set_state(self.model, self.states[0])
        with torch.enable_grad():
            logits = self._plain(self.model, x, training=False)
        leaves = _leaves(logits)
        parameters = dict(self.model.named_parameters())
        return logits.detach(), [key for key in self.keys if id(parameters[key]) not in leaves]

    def _more_images(self) -> Tensor:
        x = self.images[:MOST_ROWS]
        if not x.is_floating_point():
            return x
        noise = torch.randn(x.shape, generator=generator(0, "usage")).to(x)
        return torch.cat([x, noise])

    def _not_called(self) -> list[str]:
        """Names of the layers with something trained around them that a pass without gradients does not call."""
        model, called = self._network(), set()
        wrappers: dict[str, Any] = {
            path: module
            for path, module in model.named_modules()
            if isinstance(module, BaseTunerLayer | ModulesToSaveWrapper)
        }
        for path, module in wrappers.items():

            def forward(
                *args: object, path: str = path, run: Callable[..., object] = module.forward, **kwargs: object
            ) -> object:
                called.add(path)
                return run(*args, **kwargs)

            # Not a hook: a network may take another path where there are any.
            module.__dict__["forward"] = forward
        with torch.no_grad():
            self._plain(model, self.x, training=False)
        return [path for path in wrappers if path not in called]

    def _wrong_gradients(self, expected: dict[str, Tensor | None], gradients: dict[str, Tensor | None]) -> list[str]:
        """Names of parameters whose gradients differ by more than rounding."""
        largest = max((float(value.abs().max()) for value in expected.values() if value is not None), default=0.0)
        wrong = []
        for key, value in expected.items():
            gradient = gradients[key]
            if value is None or gradient is None:
                if (value is None) != (gradient is None):
                    wrong.append(key)
                continue
            # Rounding is relative to what was added up, which may be larger than the sum.
            allowed = 10 * self.tolerance * (float(value.abs().max()) + 1e-2 * largest)
            if float((gradient.reshape(value.shape) - value).abs().max()) > allowed:
                wrong.append(key)
        return wrong

    def _close(self, expected: Tensor, logits: Tensor) -> bool:
        """Whether logits agree up to rounding. Those that are not finite do not show anything."""
        moved = float((logits - expected).abs().max())
        return not moved > self.tolerance * max(float(expected.abs().max()), 1e-6)


def _gradients(logits: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Gradients of a fixed sum of logits by name; ``None`` where there is none."""
    if not logits.requires_grad:
        return dict.fromkeys(tensors)
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    weights = torch.randn(logits.shape, generator=generator(0, "usage")).to(logits)
    gradients = torch.autograd.grad((weights * logits).sum(), list(tensors.values()), allow_unused=True)
    return dict(zip(tensors, gradients, strict=True))


def _leaves(logits: Tensor) -> set[int]:
    """Identities of the parameters that a tensor was computed from."""
    leaves, seen, nodes = set(), set(), [logits.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of a node that accumulates gradients
        if variable is not None:
            leaves.add(id(variable))
        nodes += [before for before, _ in node.next_functions]
    return leaves


def _is_essential(adapted: AdaptedModel, key: str) -> bool:
    """Whether a parameter was chosen to be trained by itself, rather than with all others of its kind."""
    saved = "modules_to_save" in key.split(".")
    return is_adapter_key(key) or saved or key.startswith(f"{adapted.backbone.head}.")


def _named(keys: Sequence[str]) -> str:
    """The layers that parameters belong to, in words."""
    return abbreviated(list(dict.fromkeys(repr(_layer(key)) for key in keys)), 3)


def _layer(key: str) -> str:
    """Path of the layer that a parameter belongs to, or that its adapter stands around.

    >>> _layer("mlp.fc1.lora_A.default.weight"), _layer("norm.weight")
    ('mlp.fc1', 'norm')
    """
    parts = plain_name(key).split(".")
    # PEFT keeps an adapter's tensors in dictionaries by the adapter's name, here "default".
    end = parts.index("default") - 1 if "default" in parts else len(parts) - 1
    return ".".join(parts[:end])


def _moved(expected: Tensor, logits: Tensor) -> str:
    scale, moved = float(expected.abs().max()), float((logits - expected).abs().max())
    return f"logits of up to {scale:.2g} change by {moved:.2g}"
