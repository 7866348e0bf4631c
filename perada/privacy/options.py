# SPDX-License-Identifier: Apache-2.0
"""Options of private training: the sections ``privacy`` and ``client_privacy`` of a recipe."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from perada.core.checks import OptionError, check_choice, check_integer, check_number, use_plain_numbers, without_effect
from perada.core.text import value_text
from perada.privacy.accounting import check_delta, check_target_epsilon

Accountant = Literal["rdp", "prv"]
LedgerName = Literal["release", "server"]


@dataclass(frozen=True)
class Privacy:
    """Differentially private training of every client: image-level DP-SGD (Abadi et al., CCS 2016).

    Set ``noise_multiplier`` or ``target_epsilon``.

    Args:
        noise_multiplier: σ: the noise added to the sum of clipped gradients has the standard deviation σ · max_norm.
            0 clips only.
        target_epsilon: Instead: the ε, at most 50, that each client's planned rounds may cost; σ is then calibrated
            for it.
        delta: δ of every ε; must be below 1 / the number of images of the largest client.
        max_norm: Largest norm C of one image's gradient.
        clipping: ``flat`` bounds the norm over all parameters; ``per_layer`` bounds each parameter's by C / √L;
            ``automatic`` scales every gradient to about C (Bu et al. 2023).
        sampling: ``poisson`` takes each image with probability batch size / images, independently for every step and
            role; ``shuffle`` goes through the images in random order, which earns no amplification.
        accountant: ``rdp`` or ``prv`` (tighter, slower).
        ledger: The ledger that ``target_epsilon`` and ``max_epsilon`` limit: ``release``, all that a client trains, or
            ``server``, what it sends.
        max_epsilon: Limit on ε; a client whose next round would exceed it stops taking part.
        engine: Per-image gradients of all clients at once (``folded``), or from Opacus's hooks on the single model,
            one client after another (``opacus``); ``auto`` folds where the training engine does.
        physical_batch_size: Images of a client in one forward and backward pass; all of a batch by default.
        secure_rng: Draw batches and noise from a cryptographic generator, and the secret seeds of dropout and
            augmentation, whose own generators are fast and not cryptographic. ``False`` is a test mode: all follow from
            the run's seed, and whoever knows or guesses it can subtract the noise.

    Raises:
        ValueError: If an option is invalid.

    >>> Privacy(target_epsilon=3.0, delta=1e-5, ledger="release").target_epsilon
    3.0
    """

    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    delta: float = 1e-5
    max_norm: float = 1.0
    clipping: Literal["flat", "per_layer", "automatic"] = "flat"
    sampling: Literal["poisson", "shuffle"] = "poisson"
    accountant: Accountant = "rdp"
    ledger: LedgerName = "release"
    max_epsilon: float | None = None
    engine: Literal["auto", "folded", "opacus"] = "auto"
    physical_batch_size: int | None = None
    secure_rng: bool = True

    def __post_init__(self) -> None:
        use_plain_numbers(self)
        _check_common("privacy", self)
        check_number("privacy: max_epsilon", self.max_epsilon, gt=0, optional=True)
        check_integer("privacy: physical_batch_size", self.physical_batch_size, optional=True)


@dataclass(frozen=True)
class ClientPrivacy:
    """Client-level differential privacy: each client's update is clipped, and noise is added to the sum.

    DP-FedAvg of McMahan et al. (ICLR 2018), with adaptive clipping by Andrew et al. (NeurIPS 2021). The noise is in the
    mean that the server computes, so the guarantee holds against those who see the server's results, not against
    the server; with secure sums clients add the noise, and it holds against the server too. It does not cover personal
    adapters. Set ``noise_multiplier`` or ``target_epsilon``.

    Args:
        noise_multiplier: z: the noise in the sum of clipped updates has the standard deviation z · max_norm.
        target_epsilon: Instead: the ε, at most 50, that the planned rounds may cost the client who takes part most
            often.
        delta: δ of every ε; must be below 1 / number of clients.
        max_norm: Largest norm S of a client's update, with adaptive clipping that of the first round.
        clipping: ``fixed``, or ``adaptive``: the norm follows ``quantile`` of the clients' norms.
        quantile: Target share of clients whose update is left unclipped.
        clip_lr: Learning rate of the norm: it is multiplied by exp(−clip_lr · (share − quantile)) in each round.
        count_noise: Standard deviation of the noise in the number of unclipped clients; by default a
            twentieth of the clients of a round.
        accountant: ``rdp`` or ``prv``.
        secure_rng: Draw the noise from a cryptographic generator. ``False`` is a test mode: it follows from the run's
            seed, and whoever knows or guesses it can subtract the noise.

    Raises:
        ValueError: If an option is invalid.

    >>> ClientPrivacy(noise_multiplier=1.0, max_norm=0.5).max_norm
    0.5
    """

    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    delta: float = 1e-5
    max_norm: float = 1.0
    clipping: Literal["fixed", "adaptive"] = "fixed"
    quantile: float = 0.5
    clip_lr: float = 0.2
    count_noise: float | None = None
    accountant: Accountant = "rdp"
    secure_rng: bool = True
    ledger: ClassVar[LedgerName] = "server"
    max_epsilon: ClassVar[float | None] = None

    def __post_init__(self) -> None:
        use_plain_numbers(self)
        _check_common("client_privacy", self)
        check_number("client_privacy: quantile", self.quantile, ge=0, le=1, hint="0.5 is usual")
        check_number("client_privacy: clip_lr", self.clip_lr, gt=0)
        check_number("client_privacy: count_noise", self.count_noise, gt=0, optional=True)
        if self.clipping == "fixed":
            self._check_no_adaptive_options()

    def _check_no_adaptive_options(self) -> None:
        """Raise an OptionError if an option of adaptive clipping is set."""
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name in ("quantile", "clip_lr", "count_noise") and value != option.default:
                raise without_effect(
                    f"client_privacy: {option.name}", value, "clipping='fixed'", "choose clipping='adaptive'"
                )


def test_mode(*sections: Privacy | ClientPrivacy | None) -> bool:
    """Return whether any noise follows from the run's seed, which then must be kept secret."""
    return any(section is not None and not section.secure_rng for section in sections)


T = TypeVar("T")


def options_of(options_class: type[T], section: str, options: T | Mapping[str, Any] | None) -> T | None:
    """Return options as an object of their class; a dictionary of its fields is converted.

    Args:
        options_class: Class of the options, a dataclass.
        section: Name of the section, for messages.
        options: An object of this class, a dictionary of its fields, or None.

    Raises:
        ValueError: If a field is unknown or invalid.
        TypeError: If the options are of another type.
    """
    if options is None or isinstance(options, options_class):
        return options
    if not isinstance(options, Mapping):
        raise TypeError(
            f"{section} must be of type {options_class.__name__} or a dictionary of its fields, got "
            f"{value_text(options)}"
        )
    names = [field.name for field in fields(options_class)]  # type: ignore[arg-type]  # a dataclass
    for name in options:
        if name not in names:
            raise ValueError(f"{section} has no option {name!r}; its options are {', '.join(names)}")
    return options_class(**options)


def _check_common(section: str, privacy: Privacy | ClientPrivacy) -> None:
    """Check the options that both sections have."""
    noise_multiplier = privacy.noise_multiplier
    target_epsilon = privacy.target_epsilon
    if (noise_multiplier is None) == (target_epsilon is None):
        problem = "neither noise_multiplier nor target_epsilon is set"
        if noise_multiplier is not None:
            problem = f"noise_multiplier={noise_multiplier} and target_epsilon={target_epsilon} are both set"
        raise OptionError(
            f"{section}: {problem}: set exactly one of them, the noise or the ε to calibrate it for",
            name=f"{section}: noise_multiplier",
            value=noise_multiplier,
        )
    # The upper bounds keep squares finite.
    check_number(
        f"{section}: noise_multiplier",
        noise_multiplier,
        ge=0,
        le=1e100,
        optional=True,
        hint="typical values are 0.5 to 5",
    )
    check_target_epsilon(f"{section}: target_epsilon", target_epsilon, optional=True)
    check_number(f"{section}: max_norm", privacy.max_norm, gt=0, le=1e200, hint="typical values are 0.1 to 10")
    check_delta(privacy.delta, f"{section}: ")
    types = get_type_hints(type(privacy))
    for field in fields(privacy):
        if get_origin(types[field.name]) is Literal:
            choices = get_args(types[field.name])
        elif types[field.name] is bool:
            choices = (True, False)
        else:
            continue
        check_choice(f"{section}: {field.name}", getattr(privacy, field.name), choices)


def privacy_options(privacy: Privacy | None, client_privacy: ClientPrivacy | None) -> str:
    """Return the names of the options that request privacy, for messages; empty without privacy.

    >>> privacy_options(None, ClientPrivacy(1.0))
    'client_privacy'
    >>> privacy_options(Privacy(1.0), ClientPrivacy(1.0))
    'privacy and client_privacy'
    """
    sections = {"privacy": privacy, "client_privacy": client_privacy}
    return " and ".join(name for name, options in sections.items() if options is not None)
