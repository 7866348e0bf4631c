# SPDX-License-Identifier: Apache-2.0
"""Check on a small batch, before training, that a network uses its trained parameters.

An adapter is put around a layer, and works if that layer is called. A network may read the layer's weights instead,
recompute a part of its forward pass, keep what it computed from earlier weights, or never call the layer. Such an
adapter is not trained, or is trained and then not used, and no error is raised. So the logits and gradients of the
plain network are compared with those computed in other ways: through the engine, without gradients, with other weights
in between, and with the adapter merged into the weights.

All of this runs on copies that share the frozen weights. Trained parameters are moved away from their initial values,
since most adapters start as zero.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn

from perada.adapters.added import plain_name
from perada.core.seeding import generator, seeded
from perada.core.states import copy_module, get_state, parameter_keys, set_state, stack, train_mode
from perada.core.text import abbreviated
from perada.engine.engine import Engine
from perada.engine.fold import without_dropout
from perada.engine.fold_check import perturbed_states
from perada.models.adapted import AdaptedModel, is_adapter_key
from perada.models.merging import WrongMergeError, check_merged, merge_adapter
from perada.models.targets import recorded_calls

ModuleT = TypeVar("ModuleT", bound=nn.Module)
Gradients = dict[str, Tensor | None]
"""Gradients by name of the parameter; None for parameters that do not influence the result."""
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Largest difference that counts as rounding, relative to the largest number, by dtype."""
HALF_TOLERANCE = 0.05
"""The same for all other dtypes."""
MAX_IMAGES = 8
"""Number of images to try if one did not reach all trained parameters."""
LARGE_IMAGE = 3 * 64 * 64
"""Number of values above which an image is large, so that fewer are tried."""
REMEDY = (
    "call the layers as modules, name other layers in target_modules, or choose a different adapter, such as 'head'"
)


@dataclass(frozen=True)
class Usage:
    """How a network uses its trained parameters.

    Attributes:
        problem: Why it cannot be trained, and what to do; ``None`` if it can.
        unused: Names of the backbone's own trained tensors that no gradient reaches, which is harmless.
        merging: Why the adapter cannot be merged into the weights although PEFT merges it; ``None`` otherwise.
    """

    problem: str | None = None
    unused: tuple[str, ...] = ()
    merging: str | None = None


@dataclass(frozen=True)
class UnusedParameters:
    """Trained parameters that do not influence the logits.

    Attributes:
        in_training: Those that no gradient reaches in training mode.
        in_evaluation: Those that are used in training, but not in evaluation mode.
    """

    in_training: list[str]
    in_evaluation: list[str]


@dataclass(frozen=True)
class TrainingPass:
    """A pass in training mode: ``logits`` (B, K) without a graph, and ``gradients`` of their sum."""

    logits: Tensor
    gradients: Gradients


@dataclass(frozen=True)
class InferencePass:
    """A pass in evaluation mode: ``logits`` (B, K) without a graph, and the ``unused`` parameters by name."""

    logits: Tensor
    unused: list[str]


def check_usage(adapted: AdaptedModel, x: Tensor, *, channels_last: bool = False) -> Usage:
    """Check whether a network uses its trained parameters.

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
            f"only real numbers can be trained, but {abbreviated(complex_keys, 3)} {verb} complex; store both parts "
            "in a real parameter and view it with torch.view_as_complex, or choose a different adapter"
        )
    trial = _Trial(adapted, x, channels_last)
    try:
        unused = trial.unused()
        problem = _unused_problem(adapted, unused)
        difference = None if problem else trial.difference()
    except Exception as error:  # whatever a network raises where gradients are needed
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return Usage(f"it cannot be trained: {reason}; {REMEDY}")
    # Double precision distinguishes rounding from real differences. mps lacks it, and tokens have no precision.
    if difference is not None and x.is_floating_point() and x.device.type != "mps":
        difference = _difference_in_double_precision(adapted, x, channels_last, difference)
    problem = problem or difference
    if problem:
        return Usage(f"{problem}; {REMEDY}")
    return Usage(None, tuple(unused.in_training), trial.merging_problem())


def _unused_problem(adapted: AdaptedModel, unused: UnusedParameters) -> str | None:
    """Describe parameters that were selected for training but have no effect; None if there are none."""
    essential = [key for key in unused.in_training if _is_essential(adapted, key)]
    if essential:
        return (
            f"no gradient reaches {_layer_names(essential)}: the network reads the weights of these layers or does "
            "not call them"
        )
    essential = [key for key in unused.in_evaluation if _is_essential(adapted, key)]
    if essential:
        return (
            f"the network uses {_layer_names(essential)} in training but not in evaluation mode, where it reads the "
            "weights of these layers or does not call them"
        )
    return None


def _difference_in_double_precision(
    adapted: AdaptedModel,
    x: Tensor,
    channels_last: bool,
    difference: str,
) -> str | None:
    """Return the part of a ``difference`` that remains in double precision, where rounding is negligible."""
    exact = replace(adapted, peft_model=copy.deepcopy(adapted.peft_model).double())
    try:
        return _Trial(exact, x.double(), channels_last).difference()
    except Exception:  # such as of a network that converts to a fixed dtype
        return difference


def share_frozen(module: ModuleT) -> ModuleT:
    """Copy a module except for its frozen parameters, which the copy shares."""

    def shared(tensor: Tensor) -> Tensor | None:
        is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        return tensor if is_frozen else None

    return copy_module(module, shared)


class _Trial:
    """Passes through copies of a network whose trained parameters were moved away from their initial values.

    Args:
        adapted: The network.
        x: Images (B, ...) or texts.
        channels_last: Whether images are run in that memory format.
    """

    def __init__(self, adapted: AdaptedModel, x: Tensor, channels_last: bool) -> None:
        self.adapted = adapted
        self.all_images = x
        self.channels_last = channels_last
        self.keys = parameter_keys(adapted.model)
        self.states = perturbed_states(get_state(adapted.model), self.keys, num_clients=2)
        dtypes = {value.dtype for value in adapted.model.parameters() if value.is_floating_point()}
        self.tolerance = max(TOLERANCES.get(dtype, HALF_TOLERANCE) for dtype in dtypes)
        self.x = x[:1]
        if any(key.endswith("running_var") for key in self.states[0]):
            # BatchNorm rejects one image with one pixel, and divides by nearly zero for few pixels.
            images = 2 if x[0].numel() > LARGE_IMAGE else MAX_IMAGES
            self.x = torch.cat([x, x.flip(-1)])[:images]
        self.model = self._plain_network()
        # The engine's copy has different weights, so that anything it fails to load from a state is noticed.
        engine_model = without_dropout(share_frozen(adapted.model))
        self.engine = Engine(engine_model, "loop", channels_last=channels_last)

    @cached_property
    def training(self) -> TrainingPass:
        """The plain network in training mode."""
        return self._run_training_pass(self.x)

    @cached_property
    def evaluation(self) -> InferencePass:
        """The plain network in evaluation mode."""
        return self._run_evaluation_pass(self.x)

    def unused(self) -> UnusedParameters:
        """Return the trained parameters that do not influence the logits."""
        in_training = [key for key, gradient in self.training.gradients.items() if gradient is None]
        in_evaluation = [key for key in self.evaluation.unused if key not in in_training]
        if not in_training and not in_evaluation:
            return UnusedParameters([], [])
        # Other images may take other paths through the network, as with a mixture of experts.
        images = self._more_images()
        gradients = self._run_training_pass(images).gradients
        unused_again = self._run_evaluation_pass(images).unused
        return UnusedParameters(
            [key for key in in_training if gradients[key] is None],
            [key for key in in_evaluation if key in unused_again],
        )

    def difference(self) -> str | None:
        """Describe the first equivalent computation that gives a different result; ``None`` if all agree."""
        return self._difference_in_training() or self._difference_in_evaluation()

    def merging_problem(self) -> str | None:
        """Return why the adapter cannot be merged into the weights although PEFT does merge it."""
        peft_model = self.adapted.peft_model
        # An earlier pass in training mode moved running statistics.
        set_state(self.model, self.states[0])
        try:
            merged = merge_adapter(share_frozen(peft_model), self.states[0])
            check_merged(peft_model, merged, self.model.eval(), self._to_memory_format(self.x))
        except WrongMergeError as error:
            return str(error)
        except NotImplementedError:
            # PEFT has no merged form of it, which is reported where a merged model is wanted.
            return None
        return None

    def _difference_in_training(self) -> str | None:
        """Compare the plain network's gradients with those of the engine, which training uses."""
        expected = self.training
        # One client: (1, ...).
        state = {key: value.unsqueeze(0).clone() for key, value in self.states[0].items()}
        for key in self.keys:
            state[key].requires_grad_()
        with torch.enable_grad(), seeded(0, "usage"):
            logits = self.engine.logits(state, self.x.unsqueeze(0), training=True)[0]
            gradients = _gradients_of_logits(logits, {key: state[key] for key in self.keys})
        wrong = self._wrong_gradients(expected.gradients, gradients)
        if not wrong and self._is_close(expected.logits, logits.detach()):
            return None
        # A network that draws random numbers computes nothing twice: its differences mean nothing.
        again = self._run_training_pass(self.x, seed=1)
        is_repeatable = torch.equal(again.logits, expected.logits)
        if not is_repeatable or self._wrong_gradients(expected.gradients, again.gradients):
            return None
        # Missing gradients are the cause, and the other wrong ones their consequence.
        missing = [key for key in wrong if gradients[key] is None]
        where = f" of {_layer_names(missing or wrong)}" if wrong else ""
        return (
            f"gradients{where} are not computed at a client's weights: the network recomputes parts of the forward "
            "pass (turn gradient checkpointing off), or holds tensors that are neither parameters nor buffers"
        )

    def _difference_in_evaluation(self) -> str | None:
        """Compare logits in evaluation mode with and without gradients, and with other weights in between."""
        expected = self.evaluation.logits
        with torch.no_grad(), seeded(0, "usage"):
            # The state comes second, after a pass with other weights.
            states = stack([self.states[1], self.states[0]])
            after_another = self.engine.logits(states, self.x.expand(2, *self.x.shape))[1]
        with torch.inference_mode():
            inferred = self._run_network(self.model, self.x, training=False)
        # A copy is no inference tensor, and can be compared outside of inference mode.
        inferred = inferred.clone()
        if self._is_close(expected, after_another) and self._is_close(expected, inferred):
            return None
        again = self._run_network(self._plain_network(), self.x, training=False, seed=1).detach()
        if not torch.equal(again, expected):
            # It draws random numbers, see _difference_in_training.
            return None
        with torch.no_grad():
            without_gradients = self._run_network(self._plain_network(), self.x, training=False)
        for logits in (inferred, without_gradients):
            if not self._is_close(expected, logits):
                uncalled = self._uncalled_layers()
                where = f", where it does not call {abbreviated(uncalled, 3)}" if uncalled else ""
                return f"in evaluation mode {_describe_change(expected, logits)} without gradients{where}"
        change = _describe_change(expected, after_another)
        return f"the network retains results of an earlier pass: {change} after a pass with different weights"

    def _plain_network(self) -> nn.Module:
        """Copy the network in the first of the states, without dropout."""
        model = without_dropout(share_frozen(self.adapted.model))
        set_state(model, self.states[0])
        return model

    def _run_network(self, model: nn.Module, x: Tensor, training: bool, seed: int = 0) -> Tensor:
        """Run a plain network on images or texts (B, ...)."""
        if training:
            train_mode(model)
        else:
            model.eval()
        with seeded(seed, "usage"):
            logits: Tensor = model(self._to_memory_format(x))
        return logits

    def _to_memory_format(self, x: Tensor) -> Tensor:
        """Return images in the memory format of the run."""
        if self.channels_last and x.dim() == 4:
            return x.to(memory_format=torch.channels_last)
        return x

    def _run_training_pass(self, x: Tensor, seed: int = 0) -> TrainingPass:
        """Run the plain network forward and backward in training mode."""
        # An earlier pass in training mode moved running statistics.
        set_state(self.model, self.states[0])
        with torch.enable_grad():
            logits = self._run_network(self.model, x, training=True, seed=seed)
            parameters = dict(self.model.named_parameters())
            gradients = _gradients_of_logits(logits, {key: parameters[key] for key in self.keys})
        return TrainingPass(logits.detach(), gradients)

    def _run_evaluation_pass(self, x: Tensor) -> InferencePass:
        """Run the plain network in evaluation mode, with a graph that shows what it uses."""
        set_state(self.model, self.states[0])
        with torch.enable_grad():
            logits = self._run_network(self.model, x, training=False)
        leaves = _graph_leaves(logits)
        parameters = dict(self.model.named_parameters())
        unused = [key for key in self.keys if id(parameters[key]) not in leaves]
        return InferencePass(logits.detach(), unused)

    def _more_images(self) -> Tensor:
        """Return further images of the batch, and as many of noise; or further texts."""
        x = self.all_images[:MAX_IMAGES]
        if not x.is_floating_point():
            return x
        noise = torch.randn(x.shape, generator=generator(0, "usage")).to(x)
        return torch.cat([x, noise])

    def _uncalled_layers(self) -> list[str]:
        """Return the layers with trained parameters in or around them that a pass without gradients does not call."""
        model = self._plain_network()
        wrappers = {}
        for path, module in model.named_modules():
            is_wrapper = isinstance(module, BaseTunerLayer | ModulesToSaveWrapper)
            if is_wrapper:
                wrappers[path] = module
        with torch.no_grad(), recorded_calls(wrappers) as called:
            self._run_network(model, self.x, training=False)
        return [path for path in wrappers if path not in called]

    def _wrong_gradients(self, expected_gradients: Gradients, gradients: Gradients) -> list[str]:
        """Return the parameters whose gradients differ by more than rounding."""
        sizes = [float(value.abs().max()) for value in expected_gradients.values() if value is not None]
        largest = max(sizes, default=0.0)
        wrong = []
        for key, value in expected_gradients.items():
            gradient = gradients[key]
            if value is None or gradient is None:
                if value is not gradient:
                    wrong.append(key)
                continue
            # Rounding is relative to what was added up, which may be larger than the sum.
            tolerance = 10 * self.tolerance * (float(value.abs().max()) + 1e-2 * largest)
            if float((gradient.reshape(value.shape) - value).abs().max()) > tolerance:
                wrong.append(key)
        return wrong

    def _is_close(self, expected: Tensor, logits: Tensor) -> bool:
        """Return whether logits agree up to rounding; logits that are not finite prove nothing and count as equal."""
        change = float((logits - expected).abs().max())
        # The comparison is "not >" instead of "<=", so that NaN counts as equal.
        return not change > self.tolerance * max(float(expected.abs().max()), 1e-6)


def _gradients_of_logits(logits: Tensor, tensors: Mapping[str, Tensor]) -> Gradients:
    """Return the gradients of a fixed weighted sum of logits."""
    if not logits.requires_grad:
        return dict.fromkeys(tensors)
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    # Random weights: a plain sum is constant after a softmax, and nearly so after a norm.
    weights = torch.randn(logits.shape, generator=generator(0, "usage")).to(logits)
    gradients = torch.autograd.grad((weights * logits).sum(), list(tensors.values()), allow_unused=True)
    return dict(zip(tensors, gradients, strict=True))


def _graph_leaves(logits: Tensor) -> set[int]:
    """Return the ids of the parameters that a tensor was computed from."""
    leaves = set()
    visited = set()
    nodes = [logits.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        # Only nodes that accumulate the gradient of a leaf have it.
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves.add(id(variable))
        nodes += [previous for previous, _ in node.next_functions]
    return leaves


def _is_essential(adapted: AdaptedModel, key: str) -> bool:
    """Return whether a parameter was selected for training by itself, not along with all others of its kind."""
    is_saved_module = "modules_to_save" in key.split(".")
    is_in_head = any(key.startswith(f"{module}.") for module in adapted.backbone.head_modules)
    return is_adapter_key(key) or is_saved_module or is_in_head


def _layer_names(keys: Sequence[str]) -> str:
    """Return the layers of parameters for a message."""
    names = [repr(_layer_name(key)) for key in keys]
    return abbreviated(list(dict.fromkeys(names)), 3)


def _layer_name(key: str) -> str:
    """Return the layer that a parameter belongs to, or that its adapter wraps.

    >>> _layer_name("mlp.fc1.lora_A.default.weight"), _layer_name("norm.weight")
    ('mlp.fc1', 'norm')
    """
    parts = plain_name(key).split(".")
    if "default" in parts:
        # PEFT keeps an adapter's tensors in dictionaries by the adapter's name, here "default".
        return ".".join(parts[: parts.index("default") - 1])
    return ".".join(parts[:-1])


def _describe_change(expected: Tensor, logits: Tensor) -> str:
    """Describe by how much the logits differ from the expected ones."""
    largest = float(expected.abs().max())
    change = float((logits - expected).abs().max())
    return f"logits of up to {largest:.2g} change by {change:.2g}"
