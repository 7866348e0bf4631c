# SPDX-License-Identifier: Apache-2.0
"""The Python call: the same objects as a recipe's, built from arguments, and the names that options have in both."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from textwrap import indent, shorten, wrap
from typing import Any, Literal

import pytorch_lightning as pl
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch import nn

from perada.algorithms import Algorithm, make_algorithm, with_server_rule
from perada.core.checks import OptionError, check_integer, check_options
from perada.core.interruption import watch_signals
from perada.core.quiet import quiet
from perada.data import FederatedData, FederatedDataModule
from perada.data.batches.workers import explain_worker_deaths
from perada.engine.engine import EngineName
from perada.federation.diagnostics import Diagnostic
from perada.federation.settings import ClientOptimizer, StoreKind
from perada.lightning import FederatedLoop
from perada.lightning.checkpoint import find_checkpoint
from perada.lightning.module import FederatedClassifier, LRSchedule
from perada.lightning.run_fingerprint import early_fingerprint
from perada.lightning.run_folder import discard_folder_on_rejection
from perada.lightning.trainer_setup import check_trainer
from perada.lightning.trainers import make_trainer
from perada.models.adapted import AdapterChoice
from perada.privacy import ClientPrivacy, Privacy
from perada.privacy.options import options_of
from perada.results.restore import plain_data
from perada.results.run import Run
from perada.server import Distillation, SecureSums, ServerRule, make_rule
from perada.server.aggregate import Weighting

__all__ = ["FULL_NAMES", "argument_texts", "finetune", "full_name", "make_trainer"]
SECTIONS: dict[str, type] = {"model": FederatedClassifier, "data": FederatedDataModule, "federated": FederatedLoop}


def finetune(  # noqa: D417, PLR0913  # each argument is an option, and `_explain` adds the descriptions
    backbone: str | nn.Module,
    data: FederatedData | FederatedDataModule,
    *,
    adapter: AdapterChoice = "residual",
    adapter_options: dict[str, Any] | None = None,
    pretrained: bool | str = True,
    image_size: int | None = None,
    train_backbone: bool = False,
    algorithm: str | Algorithm = "perada",
    algorithm_options: dict[str, Any] | None = None,
    num_classes: int | None = None,
    rounds: int = 10,
    clients_per_round: int | None = None,
    batch_size: int | Literal["full"] | None = None,
    local_epochs: float = 1,
    local_steps: int | None = None,
    lr_personal: float = 0.01,
    lr_local: float = 0.01,
    optimizer: ClientOptimizer = "sgd",
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
    lr_schedule: LRSchedule = "constant",
    lr_gamma: float = 0.99,
    lr_every: int = 10,
    clients_per_chunk: int | None = None,
    channels_last: bool | None = None,
    cache_features: bool | None = None,
    torch_compile: bool | dict[str, Any] = False,
    metric: str | list[str | dict[str, Any]] = "auto",
    global_test_clients: int | None = None,
    weighting: Weighting = "uniform",
    server_rule: str | ServerRule = "mean",
    distillation: Distillation | dict[str, Any] | None = None,
    engine: EngineName = "auto",
    privacy: Privacy | dict[str, Any] | None = None,
    client_privacy: ClientPrivacy | dict[str, Any] | None = None,
    secure_sums: SecureSums | dict[str, Any] | None = None,
    client_store: StoreKind = "auto",
    diagnostics: bool | list[Diagnostic] = False,
    seed: int = 0,
    eval_every: int | None = None,
    trainer: pl.Trainer | None = None,
    resume_allow: list[str] | None = None,
    max_failures: int | None = None,
    drop_outliers: bool = False,
    ckpt_path: str | None = None,
    **trainer_kwargs: Any,
) -> Run:
    """Fine-tune an adapter on a frozen backbone for every client of a federation.

    Args:
        data: One dataset per client (:class:`perada.data.FederatedData`), or a datamodule.
        image_size: Side of the images in pixels: uint8 images are resized to it, ViTs built for it. A datamodule has
            its own.
        algorithm: ``perada``, ``perada_no_kd``, ``fedavg``, ``ditto``, … (docs/algorithms.md lists them), or an
            algorithm. ``flexlora``, ``lora_fair`` and ``modified_local_gd`` bring their server rule.
        algorithm_options: Options of the algorithm named, for example ``{"prox_strength": 0.1}`` of ``ditto``.
        rounds: Communication rounds; 0 returns the initial states.
        batch_size: Images in a local step, or ``"full"``; 64 by default. A datamodule has its own.
        server_rule: How the server aggregates: ``mean``, ``median``, ``trimmed_mean``, ``krum``, ``geometric_median``,
            ``norm_clipping``, ``fltrust``, ``fedavgm``, ``fedadam``, ``fedyogi``, ``fedadagrad``,
            ``modified_local_gd``, ``svd``, ``lora_fair``, or a rule.
        distillation: How the server distils (:class:`perada.server.Distillation`), or a dictionary of its fields.
            ``steps`` is 0 by default where there is no public set.
        privacy: Differential privacy of the clients' images in all that they train (:class:`perada.privacy.Privacy`),
            or a dictionary of its fields.
        client_privacy: Differential privacy of whole clients in what they send (:class:`perada.privacy.ClientPrivacy`),
            or a dictionary of its fields.
        secure_sums: Let the server see sums over clients alone (:class:`perada.server.SecureSums`), or a dictionary of
            its fields.
        eval_every: Rounds between two evaluations: by default 1, or what the ``trainer`` has.
        trainer: A Lightning trainer. It runs ``rounds`` epochs: leave its ``max_epochs`` out, or give the same number.
        ckpt_path: A checkpoint to resume from, or ``"last"`` for the newest below ``lightning_logs``.
        **trainer_kwargs: For the trainer made here, such as ``accelerator``, ``precision``, ``logger``.

    Returns:
        Models, states and metrics.

    Raises:
        ValueError: If an argument cannot be used, or they do not fit one another.
        FileNotFoundError: If weights, data or the checkpoint are missing.
    """
    arguments = dict(locals())
    watch_signals()
    check_integer("rounds", rounds, 0, hint="0 returns the initial states")
    check_integer("eval_every", eval_every, optional=True, hint="give test=[] in the data for no evaluation")
    given = data
    data = _datamodule(data, backbone, batch_size, image_size, num_classes)
    arguments["image_size"] = data.image_size
    algorithm, server_rule = with_server_rule(algorithm, server_rule)
    arguments["algorithm"] = chosen = _algorithm(algorithm, algorithm_options)
    arguments["server_rule"] = make_rule(server_rule)
    arguments["distillation"] = _distillation(distillation, chosen, bool(data.public_size))
    arguments["privacy"] = options_of(Privacy, "privacy", privacy)
    arguments["client_privacy"] = options_of(ClientPrivacy, "client_privacy", client_privacy)
    arguments["secure_sums"] = options_of(SecureSums, "secure_sums", secure_sums)
    model, server = (
        {name: arguments[name] for name in inspect.signature(kind).parameters if name in arguments}
        for kind in (FederatedClassifier, FederatedLoop)
    )
    loop, module = FederatedLoop(**server), FederatedClassifier(**model)
    del server["seed"]
    sections = {name: server.pop(name) for name in ("privacy", "client_privacy")}
    seeds = {} if loop.test_mode else {"seed_everything": seed}  # the noise would follow from it
    if trainer is None:
        lightning = {"max_epochs": rounds, "check_val_every_n_epoch": eval_every or 1} | trainer_kwargs
        with quiet():
            trainer = make_trainer(loop, rounds, eval_every or 1, **trainer_kwargs)
    else:
        _take_over(trainer, loop, rounds, eval_every, trainer_kwargs)
        lightning = {name: getattr(trainer, name) for name in ("max_epochs", "check_val_every_n_epoch")}
    config = seeds | {"trainer": lightning, "model": model, "federated": server} | sections
    loop.config = {name: as_plain(value) for name, value in config.items()} | {
        "data": f"{type(given).__name__} of {data.num_clients} clients",
        "ckpt_path": ckpt_path,
    }
    early = early_fingerprint(loop, module, data)
    path = find_checkpoint(ckpt_path, Path(trainer.default_root_dir), early, loop.resume_allow)
    with quiet(), plain_data(path, trainer), discard_folder_on_rejection(trainer), explain_worker_deaths():
        trainer.fit(module, datamodule=data, ckpt_path=path, weights_only=True)
    return loop.outcome(module)


def as_plain(value: object) -> Any:  # noqa: ANN401  # what YAML holds
    """An option as it stands in a recipe; what has no place in one as a string that shows what it is.

    >>> as_plain(make_algorithm("ditto", prox_strength=0.5))
    {'class_path': 'perada.algorithms.perada.Ditto', 'init_args': {'prox_strength': 0.5}}
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): as_plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(one) for one in value]
    if isinstance(value, Distillation | Privacy | ClientPrivacy | SecureSums):
        return asdict(value)
    if isinstance(value, Algorithm | ServerRule):
        names = [name for name in inspect.signature(type(value)).parameters if hasattr(value, name)]
        options = {name: as_plain(getattr(value, name)) for name in names}
        return {"class_path": f"{type(value).__module__}.{type(value).__qualname__}", "init_args": options}
    return shorten(repr(value), 500, placeholder="...")


def _algorithm(algorithm: str | Algorithm, options: dict[str, Any] | None) -> Algorithm:
    """Return the algorithm itself, or the one of that name with these options.

    Raises:
        ValueError: If options are given beside an algorithm that has its own.
    """
    if options is None:
        options = {}
    check_options("algorithm_options", options, "{'modes': 5}")
    if options and isinstance(algorithm, Algorithm):
        name, value = next(iter(options.items()))
        kind = type(algorithm).__name__
        raise ValueError(
            f"{name}={value!r} cannot be given beside an algorithm that is made already; give it to {kind} itself"
        )
    return make_algorithm(algorithm, **options)


def _datamodule(
    data: object, backbone: object, batch_size: int | Literal["full"] | None, size: int | None, classes: int | None
) -> FederatedDataModule:
    """The data module itself, with options of its own, or one that is made of the clients' data."""
    if isinstance(data, FederatedData):
        classes = classes or data.num_classes
        if classes is None and isinstance(backbone, nn.Module):  # its head is its last linear layer
            outputs = [layer.out_features for layer in backbone.modules() if isinstance(layer, nn.Linear)]
            classes = next(reversed(outputs), None)
        batch_size = 64 if batch_size is None else batch_size
        return FederatedDataModule(data, batch_size=batch_size, image_size=size, num_classes=classes)
    if not isinstance(data, FederatedDataModule):
        raise TypeError(f"data is a {type(data).__name__}; give a FederatedData or a FederatedDataModule")
    for name, value, own in (("batch_size", batch_size, data.batch_size), ("image_size", size, data.image_size)):
        if value not in (None, own):
            raise OptionError(
                f"{name}={value!r} cannot be given beside a datamodule, which has {own!r}; set it there",
                name=name,
                value=value,
            )
    return data


def _take_over(
    trainer: pl.Trainer, loop: FederatedLoop, rounds: int, eval_every: int | None, others: dict[str, Any]
) -> None:
    """Have a trainer of the caller's own run so many rounds, and evaluate as often as is asked for."""
    if others:
        raise ValueError(f"{sorted(others)} cannot be used beside trainer=; set them in the trainer itself")
    if any(isinstance(callback, FederatedLoop) for callback in trainer.callbacks):  # type: ignore[attr-defined]  # set by Lightning
        raise ValueError("the trainer has a FederatedLoop already, of an earlier call; give a new trainer")
    if not trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by Lightning
        if trainer.max_epochs not in (None, -1, 1000, rounds):  # 1000 is Lightning's default
            given = f"max_epochs={trainer.max_epochs} and rounds={rounds}"
            raise ValueError(f"the trainer has {given}; give both the same, or leave max_epochs out")
        trainer.fit_loop.max_epochs = rounds
    if eval_every is not None:
        trainer.check_val_every_n_epoch = eval_every
    trainer.callbacks.insert(0, loop)  # type: ignore[attr-defined]  # checkpoints must see what the loop did
    check_trainer(trainer)


def _distillation(
    distillation: Distillation | dict[str, Any] | None, algorithm: Algorithm, has_public_set: bool
) -> Distillation:
    """Return the options of the distillation. Where there is no public set, the number of steps is 0 by default."""
    options = options_of(Distillation, "distillation", {} if distillation is None else distillation)
    assert options is not None
    has_steps = isinstance(distillation, Distillation) or "steps" in (distillation or {})
    if has_steps or has_public_set:
        return options
    if algorithm.uses_distillation:
        rank_zero_info(f"{type(algorithm).__name__} runs without distillation: the data has no public set")
    return replace(options, steps=0)


FULL_NAMES = {
    **{
        name: f"{section}.{name}"
        for section, kind in SECTIONS.items()
        for name in inspect.signature(kind).parameters
        if name in inspect.signature(finetune).parameters.keys() - {"data", "privacy", "client_privacy"}
    },
    "rounds": "trainer.max_epochs",
    "eval_every": "trainer.check_val_every_n_epoch",
    "seed": "seed_everything",
}
"""The options of recipes and command lines that arguments of :func:`finetune` are; both names can be used there."""


def full_name(name: str) -> str:
    """The full name of an option; those of privacy stand beside the section ``federated``, whose loop takes them.

    >>> full_name("rounds"), full_name("federated.privacy.max_norm"), full_name("distillation.steps")
    ('trainer.max_epochs', 'privacy.max_norm', 'federated.distillation.steps')
    """
    if name in FULL_NAMES:
        return FULL_NAMES[name]
    first, dot, rest = name.partition(".")
    if first in FULL_NAMES:
        return f"{FULL_NAMES[first]}{dot}{rest}"
    return re.sub(r"^federated\.(?=(client_)?privacy(\.|$))", "", name)


def argument_texts(documented: Callable[..., Any]) -> dict[str, str]:
    """What the section Args of a docstring, or Attributes of options, says of each argument, on one line."""
    section = re.search(
        r"^(?:Args|Attributes):\n(.*?)(?:\n\n|\Z)", inspect.getdoc(documented) or "", re.DOTALL | re.MULTILINE
    )
    found = re.findall(r"^    ([*\w]+): (.*(?:\n     .*)*)", section[1] if section else "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def _explain() -> None:
    """Complete the docstring of ``finetune`` by what the classes say that take its options."""
    texts = argument_texts(FederatedLoop) | argument_texts(FederatedClassifier)
    texts |= argument_texts(finetune)
    names = [*(name for name in inspect.signature(finetune).parameters if name in texts), "**trainer_kwargs"]
    lines = (line for name in names for line in wrap(f"{name}: {texts[name]}", 112, subsequent_indent="    "))
    before, _, after = (inspect.getdoc(finetune) or "").partition("Args:\n")
    finetune.__doc__ = f"{before}Args:\n{indent(chr(10).join(lines), '    ')}\n\n{after.partition(chr(10) * 2)[2]}"


_explain()
