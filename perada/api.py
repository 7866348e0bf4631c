# SPDX-License-Identifier: Apache-2.0
"""The Python call: the same objects as a recipe's, built from arguments."""

import re
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch import nn

from perada.algorithms import Algorithm, make_algorithm
from perada.core.checks import check_options, check_whole
from perada.data import FederatedData, FederatedDataModule
from perada.engine.engine import EngineName
from perada.federation.cohort import ClientOptimizer
from perada.federation.diagnostics import Diagnostic
from perada.federation.store import StoreKind
from perada.lightning import FederatedLoop
from perada.lightning.checkpoint import find_checkpoint
from perada.lightning.checks import check_trainer
from perada.lightning.module import FederatedClassifier, LRSchedule
from perada.lightning.outcome import outcome
from perada.lightning.plain import as_plain
from perada.lightning.run_folder import no_trace_if_refused
from perada.lightning.trainer import make_trainer
from perada.lightning.untrusted import plain_data
from perada.models.backbones import AdapterChoice
from perada.privacy import ClientPrivacy, Privacy
from perada.privacy.options import options_of
from perada.results.run import Run
from perada.server import Distillation, ServerRule, make_rule
from perada.server.aggregate import Weighting
from perada.server.distill import ServerOptimizer

__all__ = ["finetune", "make_trainer"]


def finetune(
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
    clients_per_chunk: int | None = None,
    channels_last: bool | None = None,
    cache_features: bool | None = None,
    torch_compile: bool | dict[str, Any] = False,
    metric: str | list[str | dict[str, Any]] = "auto",
    global_test_clients: int | None = None,
    prox_strength: float | None = None,
    weighting: Weighting = "uniform",
    server_rule: str | ServerRule = "mean",
    distillation: Distillation | dict[str, Any] | None = None,
    distill_steps: int | None = None,
    distill_batch_size: int | Literal["full"] | None = None,
    distill_temperature: float | None = None,
    distill_until_round: int | None = None,
    distill_validate_every: int | None = None,
    distill_share_steps: bool | None = None,
    lr_server: float | None = None,
    server_optimizer: ServerOptimizer | None = None,
    engine: EngineName = "auto",
    privacy: Privacy | dict[str, Any] | None = None,
    client_privacy: ClientPrivacy | dict[str, Any] | None = None,
    client_store: StoreKind = "auto",
    diagnostics: bool | list[Diagnostic] = False,
    seed: int = 0,
    eval_every: int | None = None,
    trainer: pl.Trainer | None = None,
    resume_allow: list[str] | None = None,
    max_failures: int | None = None,
    refuse_far: bool = False,
    ckpt_path: str | None = None,
    **trainer_kwargs: Any,
) -> Run:
    """Fine-tune an adapter on a frozen backbone for every client of a federation.

    Args:
        backbone: A timm model name, ``hf:`` and a transformers name or folder, ``char_lstm`` for texts, or a module
            that maps images to logits.
        data: One dataset per client (:class:`perada.data.FederatedData`), or a datamodule.
        adapter: ``residual``, ``bottleneck``, ``lora``, ``ia3``, ``head``, ``bias_norm``, ``full``, or a PEFT config.
        adapter_options: Options of the adapter named.
        pretrained: ``True`` for the hub's weights, ``False`` for random ones, or a local file or folder.
        image_size: Side of the images in pixels: uint8 images are resized to it, ViTs built for it. A datamodule has
            its own.
        train_backbone: Train the backbone's own parameters beside the adapter's.
        algorithm: ``perada``, ``perada_no_kd``, ``fedavg``, ``ditto``, … (docs/algorithms.md lists them), or an
            algorithm.
        algorithm_options: Options of the algorithm named, for example ``{"modes": 3}`` of ``fed_ensemble``.
        num_classes: By default what the data says.
        rounds: Communication rounds; 0 returns the initial states.
        clients_per_round: Clients sampled each round; all by default.
        batch_size: Images in a local step, or ``"full"``; 64 by default. A datamodule has its own.
        local_epochs: Passes over its own data a sampled client makes each round.
        local_steps: Local steps instead of epochs.
        lr_personal: Learning rate η_p of the personal adapters.
        lr_local: Learning rate η_l of the local adapters.
        optimizer: The clients' optimiser, started afresh each round.
        momentum: Of SGD.
        weight_decay: Of the clients' optimiser.
        clip_norm: Largest norm of each client's gradient; unlimited by default.
        lr_schedule: Clients' learning rates over the rounds: ``constant``, ``cosine``, or ``exponential`` (times 0.99
            every 10 rounds).
        clients_per_chunk: Clients in one forward and backward pass, to bound memory.
        channels_last: Memory format of images and convolutions; chosen by the backbone by default.
        cache_features: Keep what the frozen part before all that is trained makes of each image; by default if it pays.
        torch_compile: Run the model through ``torch.compile``, or its options.
        metric: What models are scored by: a name such as ``accuracy``, ``auroc``, ``f1_macro`` or ``ece``, or a list of
            names and of ``{torchmetrics class: options}``; by default accuracy for single-label data, AUROC for
            multi-label.
        global_test_clients: Clients, drawn from the seed, whose models are scored on everyone's images; all by default.
        prox_strength: λ (μ) of the pull towards another model, in the algorithms that have one; by default their own.
        weighting: ``uniform``, or ``samples`` for each client's share of the round's images.
        server_rule: How the server aggregates: ``mean``, ``median``, ``trimmed_mean``, ``krum``, ``geometric_median``,
            ``norm_clipping``, ``fltrust``, ``fedavgm``, ``fedadam``, ``fedyogi``, ``fedadagrad``,
            ``modified_local_gd``, or a rule.
        distillation: How the server distils (:class:`perada.server.Distillation`), or a dictionary of its fields; where
            there is no public set, not at all. The next eight are shorthands for its fields, with its defaults.
        distill_steps: Distillation steps R each round.
        distill_batch_size: Public images a step, or ``"full"``.
        distill_temperature: Temperature T.
        distill_until_round: Rounds from this one on are not distilled.
        distill_validate_every: Score the student every so many steps on ``data.server_validation``, keep the best and
            fall back to the average; 0 for not.
        distill_share_steps: Divide the images of each step among several devices, for large batches.
        lr_server: Learning rate η_g of the distillation; it falls to zero along a cosine within each round.
        server_optimizer: ``adam`` or ``sgd``, started afresh each round.
        engine: ``folded``, ``loop`` or ``auto``.
        privacy: Differential privacy of the clients' images in all that they train (:class:`perada.privacy.Privacy`),
            or a dictionary of its fields.
        client_privacy: Differential privacy of whole clients in what they send (:class:`perada.privacy.ClientPrivacy`),
            or a dictionary of its fields.
        client_store: Where clients' states are held between rounds: ``device``, ``host`` or ``disk`` (in the run's
            folder); ``auto`` chooses by their size.
        diagnostics: Measure in each round what PerAda's theorems are about: ``True`` for all that the run allows, or a
            list of ``distillation_distance``, ``personal_distance``, ``ensemble_error``, ``gradient_norms``,
            ``update_norms``.
        seed: Seed that all randomness is derived from.
        eval_every: Rounds between two evaluations: by default 1, or what the ``trainer`` has.
        trainer: A Lightning trainer. It runs ``rounds`` epochs: leave its ``max_epochs`` out, or give the same number.
        ckpt_path: A checkpoint to resume from, or ``"last"`` for the newest below ``lightning_logs``.
        resume_allow: Options, such as ``lr_local``, that may be others than those of the run that is resumed;
            ``clients`` for more clients than it had.
        max_failures: End the run in an error once the clients' training failed more often (it became NaN, or a sample
            could not be read), every client counted in each round; by default it continues, since what is lost is named
            and is what an absent client costs. A run in which every client failed in every round ends in one anyway.
        refuse_far: Leave updates out that are more than 50 times as long as the median of the round's.
        **trainer_kwargs: For the trainer made here, such as ``accelerator``, ``precision``, ``logger``.

    Returns:
        Models, states and metrics.

    Raises:
        ValueError: If an argument cannot be used, or they do not fit one another.
        FileNotFoundError: If weights, data or the checkpoint are missing.
    """
    check_whole("rounds", rounds, 0, hint="0 returns the initial states")
    check_whole("eval_every", eval_every, optional=True, hint="give test=[] in the data for no evaluation")
    check_options("algorithm_options", {} if algorithm_options is None else algorithm_options, "{'modes': 5}")
    options = (algorithm_options or {}) | ({} if prox_strength is None else {"prox_strength": prox_strength})
    if options and isinstance(algorithm, Algorithm):
        name = next(iter(options))
        raise ValueError(
            f"{name}={options[name]!r} cannot be given beside an algorithm that is made already; give it to "
            f"{type(algorithm).__name__} itself"
        )
    chosen, given = make_algorithm(algorithm, **options), data
    if isinstance(data, FederatedData):
        classes = num_classes or data.num_classes or (_outputs(backbone) if isinstance(backbone, nn.Module) else None)
        size = 64 if batch_size is None else batch_size
        data = FederatedDataModule(data, batch_size=size, image_size=image_size, num_classes=classes)
    elif not isinstance(data, FederatedDataModule):
        raise TypeError(f"data is a {type(data).__name__}; give a FederatedData or a FederatedDataModule")
    else:
        for name, value, own in (
            ("batch_size", batch_size, data.batch_size),
            ("image_size", image_size, data.image_size),
        ):
            if value not in (None, own):
                raise ValueError(
                    f"{name}={value!r} cannot be given beside a datamodule, which has its own ({own!r}); set it there"
                )
        image_size = data.image_size
    shorthands = {
        "steps": distill_steps,
        "batch_size": distill_batch_size,
        "lr": lr_server,
        "optimizer": server_optimizer,
        "temperature": distill_temperature,
        "until_round": distill_until_round,
        "validate_every": distill_validate_every,
        "share_steps": distill_share_steps,
    }
    server: dict[str, Any] = {
        "algorithm": chosen,
        "clients_per_round": clients_per_round,
        "local_epochs": local_epochs,
        "local_steps": local_steps,
        "weighting": weighting,
        "server_rule": make_rule(server_rule),
        "distillation": _distillation(distillation, shorthands, chosen, bool(data.public_size)),
        "client_store": client_store,
        "diagnostics": diagnostics,
        "resume_allow": resume_allow,
        "max_failures": max_failures,
        "refuse_far": refuse_far,
    }
    model: dict[str, Any] = {
        "backbone": backbone,
        "adapter": adapter,
        "adapter_options": adapter_options,
        "pretrained": pretrained,
        "num_classes": num_classes,
        "image_size": image_size,
        "train_backbone": train_backbone,
        "lr_personal": lr_personal,
        "lr_local": lr_local,
        "optimizer": optimizer,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "clip_norm": clip_norm,
        "lr_schedule": lr_schedule,
        "engine": engine,
        "clients_per_chunk": clients_per_chunk,
        "channels_last": channels_last,
        "cache_features": cache_features,
        "torch_compile": torch_compile,
        "metric": metric,
        "global_test_clients": global_test_clients,
    }
    protected: dict[str, Any] = {
        "privacy": options_of(Privacy, "privacy", privacy),
        "client_privacy": options_of(ClientPrivacy, "client_privacy", client_privacy),
    }
    loop, module = FederatedLoop(**server, **protected, seed=seed), FederatedClassifier(**model)
    seeds = {} if loop.test_mode else {"seed_everything": seed}  # the noise would follow from it
    if trainer is not None:
        _take_over(trainer, rounds, eval_every, trainer_kwargs)
        lightning: dict[str, Any] = {name: getattr(trainer, name) for name in ("max_epochs", "check_val_every_n_epoch")}
    else:
        lightning = {"max_epochs": rounds, "check_val_every_n_epoch": eval_every or 1} | trainer_kwargs
    config = seeds | {"trainer": lightning, "model": model, "federated": server} | protected
    loop.config = {name: as_plain(value) for name, value in config.items()} | {
        "data": f"{type(given).__name__} of {data.num_clients} clients",
        "ckpt_path": ckpt_path,
    }
    if trainer is None:
        trainer = make_trainer(loop, rounds, eval_every or 1, **trainer_kwargs)
    else:
        trainer.callbacks.insert(0, loop)  # type: ignore[attr-defined]  # checkpoints must see what the loop did
        check_trainer(trainer)
    path = find_checkpoint(ckpt_path, Path(trainer.default_root_dir))
    with plain_data(path, trainer), no_trace_if_refused(trainer):
        trainer.fit(module, datamodule=data, ckpt_path=path, weights_only=True)
    return outcome(module, loop)


def _take_over(trainer: pl.Trainer, rounds: int, eval_every: int | None, others: dict[str, Any]) -> None:
    """Have a trainer run so many rounds, and evaluate as often as is asked for.

    A ValueError if it was made for another number of rounds, or there are options for a trainer that is made already.
    """
    if others:
        raise ValueError(f"{sorted(others)} cannot be used beside trainer=; set them in the trainer itself")
    if any(isinstance(callback, FederatedLoop) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        raise ValueError("the trainer has a FederatedLoop already, of an earlier call; give a new trainer")
    if not trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by Lightning
        if trainer.max_epochs not in (None, -1, 1000, rounds):  # 1000 is Lightning's default
            raise ValueError(
                f"the trainer has max_epochs={trainer.max_epochs} and rounds={rounds}; give both the same, or leave "
                "max_epochs out"
            )
        trainer.fit_loop.max_epochs = rounds
    if eval_every is not None:
        trainer.check_val_every_n_epoch = eval_every


def _outputs(network: nn.Module) -> int | None:
    """Outputs of the last linear layer of a network of the caller's own, which is its head."""
    linears = [layer for layer in network.modules() if isinstance(layer, nn.Linear)]
    return linears[-1].out_features if linears else None


def _distillation(
    given: Distillation | dict[str, Any] | None, shorthands: dict[str, Any], algorithm: Algorithm, public: bool
) -> Distillation:
    """The options of distillation, from an object or its fields."""
    fields = {name: value for name, value in shorthands.items() if value is not None}
    if given is not None and fields:
        name, value = next(iter(fields.items()))
        raise ValueError(
            f"distillation is given, and {name}={value!r} beside it under a name of its own: set it in distillation"
        )
    if given is None and "steps" not in fields and not public:
        if algorithm.distills:
            rank_zero_info(f"{type(algorithm).__name__} runs without distillation: the data has no public set")
        fields["steps"] = 0
    try:
        return options_of(Distillation, "distillation", given) or Distillation(**fields)
    except ValueError as error:  # which calls the fields by their own names
        raise ValueError(_as_written(str(error), fields)) from None


def _as_written(message: str, fields: dict[str, Any]) -> str:
    """A message on a field of the distillation, with the name under which ``finetune`` was given it."""
    for name in fields:
        short = {"lr": "lr_server", "optimizer": "server_optimizer"}.get(name, f"distill_{name}")
        message = re.sub(rf"^distillation: {name}\b", short, message)
    return message
