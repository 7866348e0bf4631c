# SPDX-License-Identifier: Apache-2.0
"""Federated fine-tuning by one call in Python, with the options of a recipe as arguments."""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path, PurePath
from textwrap import shorten
from typing import Any, Literal

import docstring_parser
import pytorch_lightning as pl
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch import nn

from perada.algorithms import Algorithm, make_algorithm
from perada.algorithms.specs import class_path_of
from perada.core.checks import OptionError, check_integer, check_options, check_type, without_effect
from perada.core.text import near_names, plain_number, quoted, value_text
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
from perada.models.backbones import count_outputs
from perada.models.configurations import AdapterChoice
from perada.models.text_head import TextHead
from perada.privacy import ClientPrivacy, Privacy
from perada.privacy.options import options_of
from perada.results.restore import plain_data
from perada.results.run import Run
from perada.server import Distillation, SecureSums, ServerRule, make_rule
from perada.server.aggregate import Weighting
from perada.system.interruption import watch_signals
from perada.system.quiet import quiet
from perada.tasks import Task

__all__ = ["argument_texts", "finetune", "make_trainer"]
SECTIONS: dict[str, type] = {"model": FederatedClassifier, "data": FederatedDataModule, "federated": FederatedLoop}
"""Classes whose arguments are the options of a section of a recipe."""
YamlValue = None | bool | int | float | str | list["YamlValue"] | dict[str, "YamlValue"]
"""What a value of a YAML file may be."""
STARTING_RATES = {"lr_personal": 0.03, "lr_local": 0.1, "momentum": 0.9}
"""Training where the caller sets none of these, nor an optimizer."""
ADAPTERS_OF_STARTING_RATES = ("residual", "bottleneck", "head", "ia3", "bias_norm")
"""Adapters that learn with the starting rates. Others diverge with many steps in a round."""
LOWER_LR_LOCAL = 0.03
"""Starting rate of the local adapters for other adapters, such as LoRA, and for all weights."""
OPTION_CLASSES: dict[str, type] = {
    "training": Training,
    "distillation": Distillation,
    "evaluation": Evaluation,
    "privacy": Privacy,
    "client_privacy": ClientPrivacy,
    "secure_sums": SecureSums,
}
"""Dataclasses whose fields are the options of a section of a recipe. :func:`finetune` has arguments of these names."""


def finetune(  # noqa: PLR0913  # each argument is an everyday option, and all but the first two are keywords
    backbone: str | nn.Module,
    data: FederatedData | FederatedDataModule,
    *,
    adapter: AdapterChoice = "residual",
    adapter_options: dict[str, Any] | None = None,
    pretrained: bool | str = True,
    num_classes: int | None = None,
    task: Task | None = None,
    image_size: int | None = None,
    train_backbone: bool = False,
    text_head: TextHead | dict[str, Any] | None = None,
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
    resume_allow: list[str] | None = None,
    ckpt_path: str | None = None,
    **trainer_kwargs: Any,
) -> Run:
    """Fine-tune an adapter on a frozen backbone for every client of a federation.

    ``training``, ``distillation``, ``evaluation``, ``privacy``, ``client_privacy`` and ``secure_sums`` are dataclasses,
    or dictionaries of their fields. A recipe has sections of the same names.

    Args:
        backbone: A timm model name, ``hf:`` and a transformers name or folder, ``open_clip:`` and a name or folder of
            OpenCLIP, ``smp:`` and a segmentation network (docs/tasks.md), ``char_lstm`` for texts, or a module that
            maps images to logits.
        data: One dataset per client (:class:`perada.data.FederatedData`), or a datamodule.
        adapter: A name, such as ``residual``, ``lora`` or ``full`` (docs/adapters.md has all), or a PEFT config.
        adapter_options: Options of the named adapter, for example ``{"r": 8}``.
        pretrained: Load weights from the Hub, or from this local file or folder; otherwise they are random.
        num_classes: Number of classes; by default that of the data.
        task: What is learnt from the labels, with its options, such as ``Classification(label_smoothing=0.1)``
            (docs/tasks.md); by default chosen from the labels. A datamodule has its own.
        image_size: Side of the images in pixels: uint8 images are resized to it, ViTs built for it. A datamodule has
            its own.
        train_backbone: Train the backbone's parameters in addition to the adapter's.
        text_head: Head from the names of the classes, for ``hf:`` and ``open_clip:`` backbones with a text tower, as a
            dictionary such as ``{"templates": ["a photo of a {}."]}`` (docs/adapters.md); by default a linear one.
        algorithm: ``perada``, ``fedavg``, ``ditto``, … (docs/algorithms.md lists them), or an algorithm.
        algorithm_options: Options of the named algorithm, for example ``{"prox_strength": 0.1}`` of ``ditto``.
        rounds: Communication rounds; 0 returns the initial states.
        clients_per_round: Clients sampled in a round; all of them by default.
        batch_size: Images in a local step, or ``"full"``; 64 by default. A datamodule has its own.
        lr_personal: ``lr_personal`` of ``training``: learning rate of the personal adapters. If neither a rate, nor
            momentum or an optimizer is set, training begins with the rates 0.03 and 0.1 and a momentum of 0.9, like
            the recipes of ``perada init`` (docs/results_appendix.md); otherwise the default is 0.01.
        lr_local: ``lr_local`` of ``training``: learning rate of the local adapters: if none of these is set, 0.1 for
            the adapters ``residual``, ``bottleneck``, ``head``, ``ia3`` and ``bias_norm``, and 0.03 for others, which
            0.1 can make diverge; otherwise 0.01.
        local_epochs: ``local_epochs`` of ``training``: passes of a client over its data in a round, 1 by default.
        local_steps: ``local_steps`` of ``training``: local steps in a round, instead of epochs.
        training: Options of local training (:class:`perada.Training`).
        distillation: Options of distillation (:class:`perada.server.Distillation`). ``steps`` is 0 by default if
            there is no public set.
        evaluation: Options of evaluation (:class:`perada.Evaluation`).
        privacy: Differential privacy of the clients' images in all training (:class:`perada.Privacy`).
        client_privacy: Differential privacy of entire clients in what they send (:class:`perada.ClientPrivacy`).
        secure_sums: Let the server see only sums over clients (:class:`perada.server.SecureSums`).
        weighting: ``uniform``, or ``samples`` for each client's share of the round's images.
        server_rule: How the server aggregates: ``mean``, ``median``, ``trimmed_mean``, ``krum``, ``geometric_median``,
            ``norm_clipping``, ``fltrust``, ``fedavgm``, ``fedadam``, ``fedyogi``, ``fedadagrad``,
            ``modified_local_gd``, ``svd``, ``lora_fair``, or a rule.
        client_store: Storage of clients' states: ``device``, ``host`` or ``disk``; ``auto`` chooses by their size.
        max_failures: Maximum number of failed client trainings; more end the run in an error. Unlimited by default.
            Not with ``privacy`` or ``client_privacy``, since failures depend on the images.
        drop_outliers: Drop updates whose norm is more than 50 times the round's median.
        seed: Seed that all randomness is derived from.
        trainer: A Lightning trainer. It runs ``rounds`` epochs: leave its ``max_epochs`` out, or set the same number.
            By default a trainer is created from ``trainer_kwargs``.
        resume_allow: Options, such as ``training.lr_local``, that may differ from those with which the run began;
            ``clients`` allows more clients, ``images`` different images of the same clients.
        ckpt_path: A checkpoint to resume from, or ``"last"`` for the newest below ``lightning_logs``.
        **trainer_kwargs: Options of a Lightning trainer, in place of ``trainer``: ``accelerator``, ``precision``,
            ``logger``, ``check_val_every_n_epoch`` (rounds between two evaluations, 1 by default) and so on.

    Returns:
        Models, states and metrics.

    Raises:
        ValueError: If an argument is invalid, or arguments contradict one another.
        FileNotFoundError: If weights, data or the checkpoint are missing.

    >>> import torch
    >>> part = torch.utils.data.TensorDataset(torch.rand(8, 1, 8, 8), torch.arange(8) % 2)
    >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
    >>> data = FederatedData(train=[part, part], test=[part, part])
    >>> run = finetune(network, data, adapter="full", algorithm="ditto", rounds=2)  # doctest: +SKIP
    >>> run.personal(0)  # doctest: +SKIP
    """
    watch_signals()
    check_integer("rounds", rounds, 0, hint="0 returns the initial states")
    rounds = int(rounds)  # NumPy's integers pass the check, but Lightning compares types
    check_type("trainer", trainer, pl.Trainer, "pytorch_lightning.Trainer()")
    _check_trainer_options(trainer_kwargs, rounds)
    training_arguments = {
        "lr_personal": lr_personal,
        "lr_local": lr_local,
        "local_epochs": local_epochs,
        "local_steps": local_steps,
    }
    if local_epochs is not None and local_steps is not None:
        raise without_effect("local_epochs", local_epochs, f"local_steps={local_steps!r}", "leave local_steps out")
    learns_fast = adapter in ADAPTERS_OF_STARTING_RATES and not train_backbone
    starting_rates = STARTING_RATES if learns_fast else STARTING_RATES | {"lr_local": LOWER_LR_LOCAL}
    training = _make_training(training, training_arguments, starting_rates)
    # The type that the caller passed, before a datamodule is made of it.
    data_type = type(data).__name__
    if isinstance(data, FederatedData):
        data = _make_datamodule(data, backbone, batch_size, image_size, num_classes, task)
    else:
        _check_datamodule(data, batch_size, image_size, task)
    chosen_algorithm = _make_algorithm(algorithm, algorithm_options)
    model_options: dict[str, Any] = {
        "backbone": backbone,
        "adapter": adapter,
        "adapter_options": adapter_options,
        "pretrained": pretrained,
        "num_classes": num_classes,
        "image_size": data.image_size,
        "train_backbone": train_backbone,
        "text_head": options_of(TextHead, "text_head", text_head),
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
        "distillation": _make_distillation(distillation, chosen_algorithm, bool(data.public_size)),
        "evaluation": options_of(Evaluation, "evaluation", evaluation),
        "privacy": options_of(Privacy, "privacy", privacy),
        "client_privacy": options_of(ClientPrivacy, "client_privacy", client_privacy),
        "secure_sums": options_of(SecureSums, "secure_sums", secure_sums),
    }
    loop = FederatedLoop(**loop_options, **sections, seed=seed)
    module = FederatedClassifier(**model_options)
    trainer_options: dict[str, Any]
    if trainer is None:
        trainer_options = {"max_epochs": rounds, "check_val_every_n_epoch": 1} | trainer_kwargs
        with quiet():
            trainer = make_trainer(loop, rounds, **trainer_kwargs)
    else:
        _set_up_callers_trainer(trainer, loop, rounds, trainer_kwargs)
        trainer_options = {
            "max_epochs": trainer.max_epochs,
            "check_val_every_n_epoch": trainer.check_val_every_n_epoch,
        }
    config = {"trainer": trainer_options, "model": model_options, "federated": loop_options} | sections
    # In test mode the noise of a private run follows from the seed, so the seed is not written.
    if not loop.test_mode:
        config = {"seed_everything": seed} | config
    loop.config = {name: to_yaml_value(value) for name, value in config.items()}
    loop.config["data"] = f"{data_type} of {data.num_clients} clients"
    loop.config["ckpt_path"] = ckpt_path
    early = early_fingerprint(loop, module, data)
    path = find_checkpoint(ckpt_path, Path(trainer.default_root_dir), early, loop.resume_allow)
    with quiet(), plain_data(path, trainer), discard_folder_on_rejection(trainer), explain_worker_deaths():
        trainer.fit(module, datamodule=data, ckpt_path=path, weights_only=True)
    return loop.outcome(module)


def to_yaml_value(value: object) -> YamlValue:
    """Convert the value of an option to what a recipe would hold.

    Options are converted to a mapping of their fields, algorithms and server rules to their class and its arguments. An
    object that no recipe can hold is converted to its ``repr``, cut to 500 characters.

    >>> to_yaml_value(make_algorithm("ditto", prox_strength=0.5))
    {'class_path': 'perada.algorithms.perada.Ditto', 'init_args': {'prox_strength': 0.5}}
    """
    value = plain_number(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): to_yaml_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_yaml_value(item) for item in value]
    if isinstance(value, Algorithm | ServerRule | Task):
        parameters = inspect.signature(type(value)).parameters
        init_args = {name: to_yaml_value(getattr(value, name)) for name in parameters if hasattr(value, name)}
        return {"class_path": class_path_of(type(value)), "init_args": init_args}
    if is_dataclass(value) and not isinstance(value, type) and type(value) in (TextHead, *OPTION_CLASSES.values()):
        return to_yaml_value(asdict(value))
    return shorten(repr(value), 500, placeholder="...")


def _make_training(
    training: Training | dict[str, Any] | None, arguments: Mapping[str, Any], starting_rates: Mapping[str, float]
) -> Training:
    """Return the options of training, some of which :func:`finetune` also takes as arguments.

    Args:
        training: The options, or a dictionary of some of them.
        arguments: Those arguments of :func:`finetune`; None for one that the caller left out.
        starting_rates: Rates and momentum if none of them is set.

    Raises:
        ValueError: If an option is set in both, or is out of range.
    """
    partial_options: Mapping[str, Any]
    options_set: Collection[str]
    if isinstance(training, Training):
        partial_options = {}
        # Which fields of an object were set, and which have their defaults, cannot be known.
        options_set = [field.name for field in fields(training)]
    else:
        partial_options = {} if training is None else training
        check_options("training", partial_options, "{'momentum': 0.9}")
        options_set = partial_options
    arguments_set = {name: value for name, value in arguments.items() if value is not None}
    for name, value in arguments_set.items():
        if name in options_set:
            raise OptionError(
                f"{name}={value_text(value)} cannot be combined with training={value_text(training)}; set it there",
                name=name,
                value=value,
            )
    if isinstance(training, Training):
        return training
    chosen = {**partial_options, **arguments_set}
    if not {*STARTING_RATES, "optimizer"} & set(chosen):
        chosen |= starting_rates
    result = options_of(Training, "training", chosen)
    assert result is not None
    return result


def _make_algorithm(algorithm: str | Algorithm, options: dict[str, Any] | None) -> Algorithm:
    """Return the algorithm, created with these options if it is a name.

    Raises:
        ValueError: If there are options, and the algorithm is an object, which has its own.
    """
    if options is None:
        options = {}
    check_options("algorithm_options", options, "{'modes': 5}")
    if options and isinstance(algorithm, Algorithm):
        name, value = next(iter(options.items()))
        algorithm_class = type(algorithm).__name__
        raise ValueError(
            f"{name}={value!r} cannot be combined with an algorithm object; pass it to {algorithm_class} instead"
        )
    return make_algorithm(algorithm, **options)


def _make_datamodule(
    data: FederatedData,
    backbone: object,
    batch_size: int | Literal["full"] | None,
    image_size: int | None,
    num_classes: int | None,
    task: Task | None,
) -> FederatedDataModule:
    """Return a datamodule that serves these data."""
    if batch_size is None:
        batch_size = 64
    datamodule = FederatedDataModule(
        data, batch_size=batch_size, image_size=image_size, num_classes=num_classes, task=task
    )
    if isinstance(backbone, nn.Module):
        datamodule.network_outputs = count_outputs(backbone)
    return datamodule


def _check_datamodule(
    data: object, batch_size: int | Literal["full"] | None, image_size: int | None, task: Task | None
) -> None:
    """Raise if the data are not a data module, or an argument contradicts the data module's options."""
    if not isinstance(data, FederatedDataModule):
        raise TypeError(f"data must be a FederatedData or a FederatedDataModule, got {value_text(data)}")
    datamodule_values = {"batch_size": data.batch_size, "image_size": data.image_size, "task": data.chosen_task}
    for name, value in {"batch_size": batch_size, "image_size": image_size, "task": task}.items():
        datamodule_value = datamodule_values[name]
        if value is not None and value != datamodule_value:
            setting = f"without {name}" if datamodule_value is None else f"with {name}={datamodule_value!r}"
            raise OptionError(
                f"{name}={value!r} contradicts the data module, which was created {setting}; pass {name} to "
                "FederatedDataModule, and leave it out here",
                name=name,
                value=value,
            )


def _check_trainer_options(options: Mapping[str, Any], rounds: int) -> None:
    """Raise an OptionError for an unknown option of the trainer, or for ``max_epochs`` that differs from ``rounds``."""
    trainer_options = [name for name in inspect.signature(pl.Trainer).parameters if name != "kwargs"]
    for name, value in options.items():
        if name not in trainer_options:
            options_of_finetune = inspect.signature(finetune).parameters
            similar_names = near_names(name, [*options_of_finetune, *trainer_options])
            remedy = f"did you mean {similar_names[0]}?" if similar_names else "leave it out"
            if name in ("epochs", "num_epochs"):
                remedy = "rounds and local_epochs are the options for it"
            raise OptionError(
                f"{name}={value_text(value)} is neither an option of perada.finetune nor of Lightning's Trainer; "
                f"{remedy}",
                name=name,
                value=value,
            )
    max_epochs = options.get("max_epochs", rounds)
    if max_epochs != rounds:
        raise OptionError(
            f"max_epochs={value_text(max_epochs)} contradicts rounds={rounds}; set rounds, and leave max_epochs out",
            name="max_epochs",
            value=max_epochs,
        )


def _set_up_callers_trainer(
    trainer: pl.Trainer,
    loop: FederatedLoop,
    rounds: int,
    trainer_kwargs: Mapping[str, Any],
) -> None:
    """Add the loop to the caller's trainer, and set its number of rounds.

    Raises:
        ValueError: If there are options besides the trainer's, or the trainer has another number of rounds or a loop
            already, or options that federated rounds do not support.
    """
    if trainer_kwargs:
        raise ValueError(
            f"{quoted(sorted(trainer_kwargs))} cannot be combined with trainer=; set them in the trainer itself"
        )
    if any(isinstance(callback, FederatedLoop) for callback in callbacks_of(trainer)):
        raise ValueError("the trainer already has a FederatedLoop from an earlier call; pass a new trainer")
    # fast_dev_run sets max_epochs, and the trial must stay as short as that.
    if not is_dev_run(trainer):
        # 1000 is Lightning's default.
        if trainer.max_epochs not in (None, -1, 1000, rounds):
            raise ValueError(
                f"the trainer has max_epochs={trainer.max_epochs} and rounds={rounds}; make both equal, or leave "
                "max_epochs out"
            )
        trainer.fit_loop.max_epochs = rounds
    # First, since checkpoints must see what the loop did.
    callbacks_of(trainer).insert(0, loop)
    check_trainer(trainer)


def _make_distillation(
    distillation: Distillation | dict[str, Any] | None,
    algorithm: Algorithm,
    has_public_set: bool,
) -> Distillation:
    """Return the options of the distillation. Without a public set, the number of steps is 0 by default."""
    options = options_of(Distillation, "distillation", {} if distillation is None else distillation)
    assert options is not None
    has_steps = isinstance(distillation, Distillation) or "steps" in (distillation or {})
    if has_steps or has_public_set:
        return options
    if algorithm.uses_distillation:
        rank_zero_info(f"{type(algorithm).__name__} runs without distillation: the data has no public set")
    return replace(options, steps=0)


def argument_texts(documented: Callable[..., Any]) -> dict[str, str]:
    """Return the description of each argument of a class or function, on one line, from its docstring."""
    docstring = inspect.getdoc(documented) or ""
    parsed = docstring_parser.parse(docstring, docstring_parser.DocstringStyle.GOOGLE)
    texts: dict[str, str] = {}
    for entry in parsed.params:
        # Attributes are listed too; their section is called "attribute".
        if entry.args[0] == "param":
            texts[entry.arg_name] = " ".join((entry.description or "").split())
    return texts
