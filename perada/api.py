# SPDX-License-Identifier: Apache-2.0
"""The Python call: the same objects as a recipe's, built from arguments."""

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from textwrap import shorten
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
from perada.federation.options import Evaluation, Training
from perada.federation.settings import StoreKind
from perada.lightning import FederatedLoop
from perada.lightning.checkpoint import find_checkpoint
from perada.lightning.module import FederatedClassifier
from perada.lightning.run_fingerprint import early_fingerprint
from perada.lightning.run_folder import discard_folder_on_rejection
from perada.lightning.trainer_attributes import callbacks_of, is_dev_run
from perada.lightning.trainer_setup import check_trainer
from perada.lightning.trainers import make_trainer
from perada.models.adapted import AdapterChoice
from perada.privacy import ClientPrivacy, Privacy
from perada.privacy.options import options_of
from perada.results.restore import plain_data
from perada.results.run import Run
from perada.server import Distillation, SecureSums, ServerRule, make_rule
from perada.server.aggregate import Weighting

__all__ = ["argument_texts", "finetune", "make_trainer"]
SECTIONS: dict[str, type] = {"model": FederatedClassifier, "data": FederatedDataModule, "federated": FederatedLoop}
"""Sections of a recipe and the classes whose arguments they have."""
OPTION_CLASSES: dict[str, type] = {
    "training": Training,
    "distillation": Distillation,
    "evaluation": Evaluation,
    "privacy": Privacy,
    "client_privacy": ClientPrivacy,
    "secure_sums": SecureSums,
}
"""Sections of a recipe, and arguments of :func:`finetune`, and the dataclasses whose fields they have."""


def finetune(  # noqa: PLR0913  # options that users set by name; what belongs together is in dataclasses
    backbone: str | nn.Module,
    data: FederatedData | FederatedDataModule,
    *,
    adapter: AdapterChoice = "residual",
    adapter_options: dict[str, Any] | None = None,
    pretrained: bool | str = True,
    num_classes: int | None = None,
    image_size: int | None = None,
    train_backbone: bool = False,
    algorithm: str | Algorithm = "perada",
    algorithm_options: dict[str, Any] | None = None,
    rounds: int = 10,
    clients_per_round: int | None = None,
    batch_size: int | Literal["full"] | None = None,
    lr_personal: float | None = None,
    lr_local: float | None = None,
    local_epochs: float | None = None,
    local_steps: int | None = None,
    training: Training | dict[str, Any] | None = None,
    distillation: Distillation | dict[str, Any] | None = None,
    evaluation: Evaluation | dict[str, Any] | None = None,
    privacy: Privacy | dict[str, Any] | None = None,
    client_privacy: ClientPrivacy | dict[str, Any] | None = None,
    secure_sums: SecureSums | dict[str, Any] | None = None,
    weighting: Weighting = "uniform",
    server_rule: str | ServerRule = "mean",
    client_store: StoreKind = "auto",
    max_failures: int | None = None,
    drop_outliers: bool = False,
    seed: int = 0,
    trainer: pl.Trainer | None = None,
    eval_every: int | None = None,
    resume_allow: list[str] | None = None,
    ckpt_path: str | None = None,
    **trainer_kwargs: Any,
) -> Run:
    """Fine-tune an adapter on a frozen backbone for every client of a federation.

    ``training``, ``distillation``, ``evaluation``, ``privacy``, ``client_privacy`` and ``secure_sums`` are dataclasses,
    or dictionaries of their fields. A recipe has sections of the same names.

    Args:
        backbone: A timm model name, ``hf:`` and a transformers name or folder, ``char_lstm`` for texts, or a module
            that maps images to logits.
        data: One dataset per client (:class:`perada.data.FederatedData`), or a datamodule.
        adapter: ``residual``, ``bottleneck``, ``prompt``, ``lora``, ``dual_lora``, ``ia3``, ``head``, ``bias_norm``,
            ``full``, or a PEFT config.
        adapter_options: Options of the adapter named, for example ``{"r": 8}``.
        pretrained: ``True`` for the hub's weights, ``False`` for random ones, or a local file or folder.
        num_classes: Number of classes; by default that of the data.
        image_size: Side of the images in pixels: uint8 images are resized to it, ViTs built for it. A datamodule has
            its own.
        train_backbone: Train the backbone's own parameters beside the adapter's.
        algorithm: ``perada``, ``perada_no_kd``, ``fedavg``, ``ditto``, … (docs/algorithms.md lists them), or an
            algorithm. ``flexlora``, ``lora_fair`` and ``modified_local_gd`` bring their server rule.
        algorithm_options: Options of the algorithm named, for example ``{"prox_strength": 0.1}`` of ``ditto``.
        rounds: Communication rounds; 0 returns the initial states.
        clients_per_round: Clients sampled in a round; all of them by default.
        batch_size: Images in a local step, or ``"full"``; 64 by default. A datamodule has its own.
        lr_personal: ``lr_personal`` of ``training``: learning rate of the personal adapters, 0.01 by default.
        lr_local: ``lr_local`` of ``training``: learning rate of the local adapters, 0.01 by default.
        local_epochs: ``local_epochs`` of ``training``: passes of a client over its data in a round, 1 by default.
        local_steps: ``local_steps`` of ``training``: local steps in a round, instead of epochs.
        training: How clients train, and how that is computed (:class:`perada.Training`).
        distillation: How the server distils (:class:`perada.server.Distillation`). ``steps`` is 0 by default where
            there is no public set.
        evaluation: How models are scored (:class:`perada.Evaluation`).
        privacy: Differential privacy of the clients' images in all that they train (:class:`perada.Privacy`).
        client_privacy: Differential privacy of whole clients in what they send (:class:`perada.ClientPrivacy`).
        secure_sums: Let the server see only sums over clients (:class:`perada.server.SecureSums`).
        weighting: ``uniform``, or ``samples`` for each client's share of the round's images.
        server_rule: How the server aggregates: ``mean``, ``median``, ``trimmed_mean``, ``krum``, ``geometric_median``,
            ``norm_clipping``, ``fltrust``, ``fedavgm``, ``fedadam``, ``fedyogi``, ``fedadagrad``,
            ``modified_local_gd``, ``svd``, ``lora_fair``, or a rule.
        client_store: Where clients' states are held: ``device``, ``host`` or ``disk``; ``auto`` chooses by their size.
        max_failures: End the run in an error once the clients' training failed more often; by default it continues.
            Not with ``privacy`` or ``client_privacy``, since who fails depends on the images.
        drop_outliers: Leave updates out that are more than 50 times as long as the median of the round's.
        seed: Seed that all randomness is derived from.
        trainer: A Lightning trainer. It runs ``rounds`` epochs: leave its ``max_epochs`` out, or give the same number.
        eval_every: Rounds between two evaluations: by default 1, or what the ``trainer`` has.
        resume_allow: Options, such as ``training.lr_local``, that may differ from those with which the run began;
            ``clients`` for more clients, ``images`` for other images of the same clients.
        ckpt_path: A checkpoint to resume from, or ``"last"`` for the newest below ``lightning_logs``.
        **trainer_kwargs: For the trainer made here, such as ``accelerator``, ``precision``, ``logger``.

    Returns:
        Models, states and metrics.

    Raises:
        ValueError: If an argument cannot be used, or they do not fit one another.
        FileNotFoundError: If weights, data or the checkpoint are missing.
    """
    watch_signals()
    check_integer("rounds", rounds, 0, hint="0 returns the initial states")
    check_integer("eval_every", eval_every, optional=True, hint="give test=[] in the data for no evaluation")
    everyday = {
        "lr_personal": lr_personal,
        "lr_local": lr_local,
        "local_epochs": local_epochs,
        "local_steps": local_steps,
    }
    training = _training(training, everyday)
    data_name = type(data).__name__
    data = _datamodule(data, backbone, batch_size, image_size, num_classes)
    algorithm, server_rule = with_server_rule(algorithm, server_rule)
    chosen_algorithm = _algorithm(algorithm, algorithm_options)
    model_options: dict[str, Any] = {
        "backbone": backbone,
        "adapter": adapter,
        "adapter_options": adapter_options,
        "pretrained": pretrained,
        "num_classes": num_classes,
        "image_size": data.image_size,
        "train_backbone": train_backbone,
    }
    loop_options: dict[str, Any] = {
        "algorithm": chosen_algorithm,
        "clients_per_round": clients_per_round,
        "weighting": weighting,
        "server_rule": make_rule(server_rule),
        "client_store": client_store,
        "resume_allow": resume_allow,
        "max_failures": max_failures,
        "drop_outliers": drop_outliers,
    }
    sections: dict[str, Any] = {
        "training": training,
        "distillation": _distillation(distillation, chosen_algorithm, bool(data.public_size)),
        "evaluation": options_of(Evaluation, "evaluation", evaluation),
        "privacy": options_of(Privacy, "privacy", privacy),
        "client_privacy": options_of(ClientPrivacy, "client_privacy", client_privacy),
        "secure_sums": options_of(SecureSums, "secure_sums", secure_sums),
    }
    loop = FederatedLoop(**loop_options, **sections, seed=seed)
    module = FederatedClassifier(**model_options)
    if trainer is None:
        trainer_options = {"max_epochs": rounds, "check_val_every_n_epoch": eval_every or 1} | trainer_kwargs
        with quiet():
            trainer = make_trainer(loop, rounds, eval_every or 1, **trainer_kwargs)
    else:
        _take_over(trainer, loop, rounds, eval_every, trainer_kwargs)
        trainer_options = {name: getattr(trainer, name) for name in ("max_epochs", "check_val_every_n_epoch")}
    config = {"trainer": trainer_options, "model": model_options, "federated": loop_options} | sections
    # The noise of a private run in test mode would follow from the seed.
    if not loop.test_mode:
        config = {"seed_everything": seed} | config
    loop.config = {name: as_plain(value) for name, value in config.items()}
    loop.config["data"] = f"{data_name} of {data.num_clients} clients"
    loop.config["ckpt_path"] = ckpt_path
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
    if is_dataclass(value) and not isinstance(value, type) and type(value) in OPTION_CLASSES.values():
        return as_plain(asdict(value))
    if isinstance(value, Algorithm | ServerRule):
        names = [name for name in inspect.signature(type(value)).parameters if hasattr(value, name)]
        options = {name: as_plain(getattr(value, name)) for name in names}
        return {"class_path": f"{type(value).__module__}.{type(value).__qualname__}", "init_args": options}
    return shorten(repr(value), 500, placeholder="...")


def _training(training: Training | dict[str, Any] | None, everyday: Mapping[str, Any]) -> Training:
    """Return the options of training, some of which :func:`finetune` also takes as arguments of their own.

    Args:
        training: The options, or a dictionary of some of them.
        everyday: The arguments; those that were not given are None.

    Raises:
        ValueError: If an option is given twice, or is out of range.
    """
    set_options = {name: value for name, value in everyday.items() if value is not None}
    if isinstance(training, Training):
        fields_of_section: Collection[str] = [field.name for field in fields(training)]
    else:
        training = {} if training is None else training
        check_options("training", training, "{'momentum': 0.9}")
        fields_of_section = training
    for name, value in set_options.items():
        if name in fields_of_section:
            raise OptionError(
                f"{name}={value!r} cannot be given beside training={training!r}; set it there", name=name, value=value
            )
    if isinstance(training, Training):
        return training
    options = options_of(Training, "training", training | set_options)
    assert options is not None
    return options


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
    if any(isinstance(callback, FederatedLoop) for callback in callbacks_of(trainer)):
        raise ValueError("the trainer has a FederatedLoop already, of an earlier call; give a new trainer")
    if not is_dev_run(trainer):
        if trainer.max_epochs not in (None, -1, 1000, rounds):  # 1000 is Lightning's default
            given = f"max_epochs={trainer.max_epochs} and rounds={rounds}"
            raise ValueError(f"the trainer has {given}; give both the same, or leave max_epochs out")
        trainer.fit_loop.max_epochs = rounds
    if eval_every is not None:
        trainer.check_val_every_n_epoch = eval_every
    # First, since checkpoints must see what the loop did.
    callbacks_of(trainer).insert(0, loop)
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


def argument_texts(documented: Callable[..., Any]) -> dict[str, str]:
    """What the section Args of a docstring, or Attributes of options, says of each argument, on one line."""
    section = re.search(
        r"^(?:Args|Attributes):\n(.*?)(?:\n\n|\Z)", inspect.getdoc(documented) or "", re.DOTALL | re.MULTILINE
    )
    found = re.findall(r"^    ([*\w]+): (.*(?:\n     .*)*)", section[1] if section else "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}
