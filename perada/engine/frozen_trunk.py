# SPDX-License-Identifier: Apache-2.0
"""The part of a model before all trained tensors, whose outputs for an image are constant during a run.

It is the complete backbone if only a head is trained, and the stem and the first frozen layers if adapters are. Its
outputs, the features of an image, can be computed once and be used instead of the image in every later pass.

It is found by experiments on example images, so that any model is supported. A module is *constant* if its output stays
the same when the trained tensors, the mode or the other images of the batch change, and if no random number is drawn
before it. A constant module is *needed* if the logits depend on its output. Finally, the features must give the same
logits as their images.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from perada.core.states import clone, tied_names, train_mode
from perada.engine.fold import draws, fold
from perada.engine.stacked_layers import StackedDropout
from perada.engine.substitutes import WrappingSubstitute
from perada.engine.without_numbers import share_before_trained


class _FeaturesComplete(Exception):
    """Raised to end a pass through the model early, once all features have been computed."""


@dataclass(frozen=True)
class RecordedPass:
    """A pass on images, and the outputs of frozen layers in it.

    Attributes:
        logits: What the model returned.
        outputs: Outputs (R, ...) of the needed modules, by path and in the order of their calls.
    """

    logits: Tensor
    outputs: dict[str, Tensor]


@dataclass(frozen=True)
class KeptFeatures:
    """Features that another trunk can use: that of a run with the same network, frozen weights and trained layers.

    Attributes:
        features: Features (R, F) of images.
        image_dtype: The dtype of the images.
        formats: Dtype and memory format of the needed modules' outputs, by path.
    """

    features: Tensor
    image_dtype: torch.dtype | None
    formats: Mapping[str, tuple[torch.dtype, torch.memory_format]]

    @property
    def nbytes(self) -> int:
        """Size of the features in bytes."""
        return self.features.nbytes


@dataclass(frozen=True)
class FeaturePass:
    """A pass that takes the outputs of constant modules from features.

    Attributes:
        num_rows: Number of rows R.
        outputs: Outputs (R, ...) of the needed modules, by path, which are not changed.
    """

    num_rows: int
    outputs: Mapping[str, Tensor]


class FrozenTrunk:
    """The constant modules of a model, and their outputs in the current pass.

    The *features* (F,) of an image are the outputs of the needed modules, flattened and concatenated.

    Args:
        shapes: Shape of each constant module's output for one image, by the module's path.
        needed: Paths of the modules whose outputs are the features, in the order of their calls.
        image_shape: Shape of an image.
        share: Share of a forward pass's floating-point operations that features save.

    Attributes:
        size: Number F of elements of an image's features.
        feature_pass: The current pass, if it runs on features; None if it runs on images.
        spoil: Whether blank images and the outputs that features replace are filled with NaN, which shows whether a
            model uses them.
    """

    def __init__(
        self,
        shapes: dict[str, torch.Size],
        needed: tuple[str, ...],
        image_shape: torch.Size,
        share: float = 0.0,
    ) -> None:
        self.shapes = shapes
        self.needed = needed
        self.image = image_shape
        self.share = share
        self.size = sum(shapes[path].numel() for path in needed)
        self.spoil = False
        self.feature_pass: FeaturePass | None = None
        # Outputs that were computed so far, by path; None unless the current pass computes features.
        self._recorded_outputs: dict[str, Tensor] | None = None
        # Whether the current pass ends as soon as all features are known.
        self._ends_early = True
        # The dtype of images, which features need not have: with autocast they are of lower precision.
        self._image_dtype: torch.dtype | None = None
        # The dtypes and memory formats of the outputs, by path, which concatenated features do not have any more.
        self._formats: dict[str, tuple[torch.dtype, torch.memory_format]] = {}

    def wrap(self, module: nn.Module, module_path: str) -> nn.Module:
        """Return the module to use at ``module_path`` of a folded model: a wrapper if the module is constant."""
        if module_path in self.shapes:
            return ConstantModule(module, module_path, self)
        return module

    def parts(self, features: Tensor) -> dict[str, Tensor]:
        """Split features (R, F) into the flattened outputs (R, ...) of the needed modules, by path."""
        sizes = [self.shapes[path].numel() for path in self.needed]
        return dict(zip(self.needed, torch.split(features, sizes, 1), strict=True))

    def holds(self, x_R: Tensor) -> bool:
        """Return whether the rows of a batch are features (R, F) rather than images (R, ...)."""
        return x_R.dim() == 2 and x_R.shape[1] == self.size

    def feed(self, x_R: Tensor) -> Tensor:
        """Prepare a pass on images or features.

        Args:
            x_R: Images (R, ...) or features (R, F).

        Returns:
            The model's input: the images as they are, or a blank image for each row of features.
        """
        self.feature_pass = None
        if not self.holds(x_R):
            return x_R
        outputs: dict[str, Tensor] = {}
        for path, part in self.parts(x_R).items():
            dtype, layout = self._formats.get(path, (part.dtype, torch.contiguous_format))
            outputs[path] = part.view(-1, *self.shapes[path]).to(dtype, memory_format=layout)
        self.feature_pass = FeaturePass(len(x_R), outputs)
        return self._blank_images(len(x_R), x_R)

    def _blank_images(self, num_rows: int, like: Tensor) -> Tensor:
        """Return the input of a pass that takes the outputs of constant modules from elsewhere.

        Args:
            num_rows: Number R of images.
            like: Tensor on the device of the pass.

        Returns:
            Images (R, ...).
        """
        blank = torch.nan if self.spoil else 0.0
        # A view of a single number takes no memory.
        return like.new_full((), blank, dtype=self._image_dtype).expand(num_rows, *self.image)

    def features(self, model: nn.Module, x_R: Tensor) -> Tensor:
        """Compute the features of images.

        Args:
            model: A model that was folded with :meth:`wrap`.
            x_R: Images (R, ...).

        Returns:
            Features (R, F).
        """
        self.feature_pass = None
        self._recorded_outputs = {}
        if x_R.is_floating_point():
            self._image_dtype = x_R.dtype
        model.eval()
        # The pass ends as soon as the last needed output is known.
        with suppress(_FeaturesComplete), torch.no_grad():
            model(x_R)
        outputs = self._recorded_outputs
        self._recorded_outputs = None
        for path, output in outputs.items():
            self._formats[path] = (output.dtype, _memory_format_of(output))
        flat_outputs = [outputs[path].flatten(1) for path in self.needed]
        return torch.cat(flat_outputs, 1)

    def keep(self, features: Tensor) -> KeptFeatures:
        """Return features with what another trunk needs to use them."""
        return KeptFeatures(features, self._image_dtype, dict(self._formats))

    def take(self, kept: KeptFeatures) -> Tensor:
        """Return the features (R, F) that another trunk computed, as if this one had."""
        self._image_dtype = kept.image_dtype
        self._formats.update(kept.formats)
        return kept.features

    def run(self, model: nn.Module, x_R: Tensor) -> RecordedPass:
        """Run a pass on images, and keep what other models with the same frozen layers can take from it.

        Args:
            model: A model in evaluation mode that was folded with :meth:`wrap`.
            x_R: Images (R, ...).
        """
        self.feature_pass = None
        self._recorded_outputs = {}
        self._ends_early = False
        if x_R.is_floating_point():
            self._image_dtype = x_R.dtype
        try:
            logits = model(x_R)
            outputs = self._recorded_outputs
        finally:
            self._recorded_outputs = None
            self._ends_early = True
        return RecordedPass(logits, outputs)

    def run_from(self, model: nn.Module, outputs: Mapping[str, Tensor]) -> Tensor:
        """Run a pass from the outputs of the needed modules on.

        Args:
            model: A model in evaluation mode that was folded with :meth:`wrap`.
            outputs: The outputs (R, ...) of a :class:`RecordedPass`, which are not changed.

        Returns:
            What the model returns for the images of that pass.
        """
        first_output = next(iter(outputs.values()))
        num_rows = len(first_output)
        self.feature_pass = FeaturePass(num_rows, outputs)
        logits: Tensor = model(self._blank_images(num_rows, first_output))
        self.feature_pass = None
        return logits

    def output(self, module_path: str, run_model: Callable[[], Tensor], like: Tensor) -> Tensor:
        """Return the output of a constant module in the current pass: computed now, or cut from the features.

        Args:
            module_path: Path of the module.
            run_model: Function that computes the output.
            like: Tensor with the dtype and device of the output.
        """
        if self.feature_pass is not None:
            if module_path in self.feature_pass.outputs:
                # A model may change the output in place, and run again in the backward pass, so this is a copy.
                return self.feature_pass.outputs[module_path].clone()
            # The values of an output that is not needed are not used, but the model may depend on its shape.
            shape = (self.feature_pass.num_rows, *self.shapes[module_path])
            if self.spoil:
                return like.new_full(shape, torch.nan)
            return like.new_empty(shape)
        out = run_model()
        if self._recorded_outputs is not None and module_path in self.needed:
            # A model may change the output in place, so this is a copy.
            self._recorded_outputs[module_path] = out.clone()
            if self._ends_early and len(self._recorded_outputs) == len(self.needed):
                raise _FeaturesComplete
        return out


class ConstantModule(WrappingSubstitute):
    """Wraps a constant module, whose output it takes from the features in passes on them."""

    def __init__(self, original: nn.Module, module_path: str, trunk: FrozenTrunk) -> None:
        super().__init__(original)
        self.path = module_path
        self.trunk = trunk

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return the output of the wrapped module."""
        return self.trunk.output(self.path, lambda: self.original(x, *args, **kwargs), x)


def _memory_format_of(value: Tensor) -> torch.memory_format:
    """Return the memory format of a tensor: ``channels_last`` or ``contiguous_format``."""
    if value.dim() != 4 or value.is_contiguous():
        return torch.contiguous_format
    if value.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format


def find_trunk(model: nn.Module, image: Tensor, least_share: float = 0.0) -> FrozenTrunk | None:
    """Find the constant modules of a model, and which of them are needed.

    Args:
        model: The model of a single client.
        image: A prepared image (channels, height, width), or the tokens of a text.
        least_share: Share of a forward pass's floating-point operations that features must save.

    Returns:
        The trunk; None if no module is constant, or if passes on features fail, give other logits, or save less.
    """
    # Passes without numbers take no time. They count a few operators otherwise, so they decide clear cases only.
    if least_share > 0:
        largest_share = share_before_trained(model, image)
        if largest_share is not None and largest_share < least_share / 2:
            return None
    # Three different examples. Tokens cannot be scaled, so a text gets the same tokens in another order.
    third_image = 0.5 * image if image.is_floating_point() else image.roll(1)
    x_R = torch.stack([image, image.flip(-1), third_image])
    try:
        return _find_trunk(model, x_R, least_share)
    except Exception as error:  # a model's own code raises errors of any kind for unusual inputs
        failed = f"{type(error).__name__}: {error}"
        logging.getLogger(__name__).info("features of the model's frozen part cannot replace images: %s", failed)
        return None


def _find_trunk(model: nn.Module, x_R: Tensor, least_share: float) -> FrozenTrunk | None:
    """Find the trunk as :func:`find_trunk` does, given three different images (3, ...)."""
    image_shape = x_R.shape[1:]
    shapes = _find_constant_modules(model, x_R)
    if not shapes:
        return None

    # The first trunk has the outputs of all constant modules as features, which shows which of them are needed.
    trunk = FrozenTrunk(shapes, needed=tuple(shapes), image_shape=image_shape)
    trunk.spoil = True
    module = fold(model, random_only=True, wrap=trunk.wrap).model
    module.eval()
    with FlopCounterMode(display=False) as pass_flops, torch.no_grad():
        expected = module(x_R)
    with FlopCounterMode(display=False) as trunk_flops:
        features = trunk.features(module, x_R)
    share = trunk_flops.get_total_flops() / max(1, pass_flops.get_total_flops())
    if share < least_share:
        return None
    needed = _find_needed_modules(trunk, module, features, expected)
    if not needed:
        return None

    # The second trunk has only the needed features, and is tested.
    trunk = FrozenTrunk(shapes, needed, image_shape, share)
    if x_R.dim() == 2 and trunk.size == x_R.shape[1]:
        # By their shape, these features could not be distinguished from texts.
        return None
    module = fold(model, random_only=True, wrap=trunk.wrap).model
    features = trunk.features(module, x_R)
    features_in_pair = trunk.features(module, x_R[:2])
    tolerance = 1e-3 * float(features.abs().max())
    if not torch.allclose(features_in_pair, features[:2], rtol=1e-3, atol=tolerance):
        # The features of an image depend on the other images of the batch.
        return None
    if not _features_replace_images(trunk, module, features, x_R):
        return None
    return trunk


def _features_replace_images(trunk: FrozenTrunk, module: nn.Module, features: Tensor, x_R: Tensor) -> bool:
    """Return whether features give the same logits as their images, in evaluation and in training mode.

    Trained tensors are changed before, since a branch that is initially zero would hide a difference. Other images pass
    in between, since modules may remember the last ones.

    Args:
        trunk: The trunk to test.
        module: The model, folded with the trunk.
        features: Features (3, F) of the images.
        x_R: Images (3, ...).
    """
    tensors = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    for name, parameter in module.named_parameters():
        tensors[name] = parameter.detach().clone()
        if parameter.requires_grad:
            tensors[name] += 0.01
    tied = tied_names(module)

    def logits(rows_R: Tensor) -> Tensor:
        with torch.no_grad(), torch.random.fork_rng([x_R.device] if x_R.is_cuda else []):
            torch.manual_seed(0)
            # A pass in training mode may write to buffers, so these are copies.
            copies = clone(tensors)
            for name, first_name in tied.items():
                copies[name] = copies[first_name]
            out: Tensor = functional_call(module, copies, (trunk.feed(rows_R),), tie_weights=False)
            return out

    trunk.spoil = True
    for set_mode in (nn.Module.eval, train_mode):
        set_mode(module)
        for part in module.modules():
            # This dropout draws from the clients' streams, which there are none of here.
            if isinstance(part, StackedDropout):
                part.training = False
        expected = logits(x_R)
        logits(x_R.flip(0))
        if not torch.equal(logits(features), expected):
            return False
    trunk.spoil = False
    return True


class _Output(NamedTuple):
    """Summary of a module's output in a pass.

    Attributes:
        shape: Shape (R, ...) of the output.
        fingerprint: A number (R,) for each row, which differs between rows with different contents.
        norm: Norm (R,) of each row.
        changing: Whether the output depends on trained tensors or random numbers.
    """

    shape: torch.Size
    fingerprint: Tensor
    norm: Tensor
    changing: bool


def _find_constant_modules(model: nn.Module, x_R: Tensor) -> dict[str, torch.Size]:
    """Find the outermost constant modules of a model.

    Args:
        model: The model of a single client.
        x_R: Three images (3, ...).

    Returns:
        Shape of each module's output for one image, by the module's path and in the order of the calls.
    """
    modules = dict(model.named_modules())
    outputs_of_three = _summarize_outputs(model, x_R, training=False)
    # These passes have fewer images, other values of the trained tensors, and training mode.
    outputs_of_two = _summarize_outputs(model, x_R[:2], training=True)
    constant: dict[str, torch.Size] = {}
    for path, output in outputs_of_three.items():
        other_output = outputs_of_two.get(path)
        # Wrapping an identity would save nothing.
        if output is None or other_output is None or isinstance(modules[path], nn.Identity):
            continue
        if _outputs_agree(output, other_output, len(x_R)):
            constant[path] = output.shape[1:]

    # Modules inside a constant one do not run in passes on features, which replace the output of the outer one.
    inner: set[nn.Module] = set()
    for path in constant:
        inner.update(part for part in modules[path].modules() if part is not modules[path])
    return {path: shape for path, shape in constant.items() if modules[path] not in inner}


def _outputs_agree(output: _Output, output_of_two: _Output, num_rows: int) -> bool:
    """Return whether a module's outputs for the first two images are the same in both passes.

    Args:
        output: Output for all images.
        output_of_two: Output for the first two of them.
        num_rows: Number of all images.
    """
    if output.changing or output_of_two.changing:
        return False
    # The first axis must be that of the images.
    if len(output.fingerprint) != num_rows or len(output_of_two.fingerprint) != 2:
        return False
    if output.shape[1:] != output_of_two.shape[1:]:
        return False
    difference = (output.fingerprint[:2] - output_of_two.fingerprint).abs()
    return bool((difference <= 1e-3 * output.norm[:2]).all())


class _OutputRecorder:
    """Records summaries of the outputs of a model's modules in a pass, by forward hooks.

    Args:
        device: Device of the pass.
        training: Whether the pass is in training mode.

    Attributes:
        outputs: Summary of each module's output, by path; ``None`` for an output that cannot be a feature.
    """

    def __init__(self, device: torch.device, training: bool) -> None:
        self.outputs: dict[str, _Output | None] = {}
        self._device = device
        self._training = training
        self._initial_rng_state = self._rng_state()

    def begin(self) -> None:
        """Begin a pass: random numbers that are drawn from now on are detected."""
        self._initial_rng_state = self._rng_state()

    def hook(self, module_path: str, module: nn.Module, inputs: object, out: object) -> object:
        """Record the output of the module at ``module_path`` and return it.

        With ``module_path`` bound, this is a forward hook of torch.
        """
        if not isinstance(out, Tensor) or not out.is_floating_point() or out.dim() == 0 or module_path in self.outputs:
            # The output has no rows of numbers, or this is the second call of the module.
            self.outputs[module_path] = None
            return out
        if draws(module):
            # Dropout, which is turned off here, is treated like a trained module: its output must differ between the
            # two passes, and so must the outputs that depend on it.
            if self._training:
                out = 1 - out
            out = out.detach().requires_grad_()
        # On the CPU, since mps has no double precision.
        exact = out.detach().cpu().double()
        rows = exact.flatten(1) if out.dim() > 1 else exact.unsqueeze(1)
        # A sum with different weights, so that the fingerprint depends on the order of a row's elements.
        weights = torch.arange(rows.shape[1]).double().cos()
        fingerprints = rows @ weights
        has_drawn = not torch.equal(self._rng_state(), self._initial_rng_state)
        changing = out.requires_grad or has_drawn
        self.outputs[module_path] = _Output(out.shape, fingerprints, rows.norm(dim=1), changing)
        return out

    def _rng_state(self) -> Tensor:
        """Return the state of torch's global generator on the device."""
        if self._device.type == "cuda":
            return torch.cuda.get_rng_state(self._device)
        return torch.get_rng_state()


def _summarize_outputs(model: nn.Module, x_R: Tensor, training: bool) -> dict[str, _Output | None]:
    """Return summaries of the outputs of a model's modules, by path; ``None`` for an output that cannot be a feature.

    The pass leaves the model's tensors and torch's global generator as they were.

    Args:
        model: The model of a single client.
        x_R: Images (R, ...).
        training: Whether the model is in training mode; its trained tensors then have other values.
    """
    tensors = {key: value.detach().clone() for key, value in model.named_buffers()}
    for key, value in model.named_parameters():
        if value.requires_grad:
            new_value = 0.1 - value if training else value
            tensors[key] = new_value.detach().requires_grad_()
    for name, first_name in tied_names(model).items():
        if first_name in tensors:
            tensors[name] = tensors[first_name]

    if training:
        train_mode(model)
    else:
        model.eval()
    for module in model.modules():
        if draws(module):
            module.training = False

    recorder = _OutputRecorder(x_R.device, training)
    hooks = []
    for path, module in model.named_modules():
        hooks.append(module.register_forward_hook(partial(recorder.hook, path)))
    try:
        with torch.enable_grad(), torch.random.fork_rng([x_R.device] if x_R.is_cuda else []):
            recorder.begin()
            functional_call(model, tensors, (x_R,), tie_weights=False)
    finally:
        for hook in hooks:
            hook.remove()
    return recorder.outputs


def _find_needed_modules(trunk: FrozenTrunk, module: nn.Module, features: Tensor, expected: Tensor) -> tuple[str, ...]:
    """Find the modules on whose outputs the logits depend.

    Args:
        trunk: A trunk whose features are the outputs of all constant modules.
        module: The model, folded with the trunk.
        features: Features (R, F) of some images.
        expected: Logits (R, K) of these images.

    Returns:
        Paths of the needed modules; empty if even the complete features give other logits.
    """
    parts = trunk.parts(features)

    def gives_expected_logits_without(spoilt: set[str]) -> bool:
        values = []
        for path, part in parts.items():
            # NaN in an output that is used would be found in the logits.
            if path in spoilt:
                part = torch.full_like(part, torch.nan)
            values.append(part)
        spoilt_features = torch.cat(values, 1)
        with torch.no_grad():
            logits = module(trunk.feed(spoilt_features))
        return torch.equal(logits, expected)

    if not gives_expected_logits_without(set()):
        return ()
    not_needed: set[str] = set()
    for path in parts:
        if gives_expected_logits_without(not_needed | {path}):
            not_needed.add(path)
    return tuple(path for path in parts if path not in not_needed)
