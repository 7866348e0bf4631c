# SPDX-License-Identifier: Apache-2.0
"""Runs of PerAda on which rules of prediction are compared, and the outputs of all models for held-out images.

Shapes: M clients, N held-out images, R training images of a client, K classes, D statistics, F features.
"""

import logging
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

from benchmarks.machine import machine_facts
from perada.cli.runs import PeradaCLI
from perada.data import Digits, FederatedDataModule
from perada.data.batches.transforms import resize_uint8
from perada.data.sets.scanners import DEVICES, scan
from perada.data.shifts import MAIN, Condition
from perada.federation.both_models import BothModels
from perada.federation.typical_images import MAX_EXAMPLES
from perada.system.quiet import info_messages_disabled

FOLDER = Path("lightning_logs/prediction_rules")
"""Outputs of finished runs, from which rules are scored again without training. Delete it to train again."""
FOLDER_DEVICES = tuple(DEVICES)[:5]
"""Scanners of the setting with own folders, one for each folder."""
IMAGES_PER_FOLDER = 120
IMAGE_SIDE = 32
"""Height and width of all images, in pixels."""
HELD_OUT_SHARE = 0.2
SEVERITY = 3
"""Of the corruptions, from 1 to 5."""
SCORE_TOLERANCE = 1e-6
"""Up to which scores of this file may differ from those of the run."""


@dataclass(frozen=True)
class Setting:
    """Clients on which rules are compared.

    Attributes:
        name: Its name in the tables.
        options: Options of `perada fit`.
        seed_options: Options that are set to the seed.
        own_folders: Whether the images are folders of files, which are written before.
        corrupted: Name of a second setting: the same run on corrupted held-out images. Empty for none.
    """

    name: str
    options: tuple[str, ...]
    seed_options: tuple[str, ...] = ("seed_everything", "data.seed")
    own_folders: bool = False
    corrupted: str = ""


TWO_BLOCKS = (
    "--config=quickstart",
    "--model.adapter_options.last_blocks=2",
    "--data.dataset.init_args.dataset=Digits",
    "--data.public=null",
    "--data.public_fraction=0.25",
)
"""The recipe `quickstart` as it was when the rule was chosen."""
SEEDS_OF_SCANNERS = ("seed_everything", "data.seed", "data.dataset.seed")
SETTINGS = (
    Setting("scanners", TWO_BLOCKS, SEEDS_OF_SCANNERS, corrupted="corruptions"),
    Setting("scanners and labels", (*TWO_BLOCKS, "--data.dataset.alpha=0.1"), SEEDS_OF_SCANNERS),
    Setting("labels", ("--config=digits", "--federated.algorithm.prox_strength=1")),
    Setting(
        "own folders",
        (
            "--config=images/perada",
            "--model.backbone=test_resnet",
            "--model.pretrained=perada:fashion_test_resnet",
            f"--data.image_size={IMAGE_SIDE}",
            "--data.num_workers=0",
            "--training.lr_personal=0.1",
            "--training.lr_local=0.1",
            "--trainer.max_epochs=15",
            "--distillation.steps=20",
        ),
        own_folders=True,
    ),
)
SHARED_OPTIONS = (
    f"--data.client_validation={HELD_OUT_SHARE}",
    "--data.evaluate_on=validation",
    "--evaluation.prediction=both",
    "--trainer.accelerator=cpu",
    "--trainer.logger=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.enable_progress_bar=false",
)


@dataclass(frozen=True)
class Size:
    """Numbers of a benchmark, full or quick.

    Attributes:
        settings: The settings.
        seeds: Of the runs.
        options: Further options of `perada fit`.
        corruptions: Kinds of corruption.
        saved: Whether outputs of runs are saved and read.
    """

    settings: tuple[Setting, ...] = SETTINGS
    seeds: tuple[int, ...] = (1, 2)
    options: tuple[str, ...] = ()
    corruptions: tuple[str, ...] = MAIN
    saved: bool = True


FULL = Size()
QUICK = Size(
    # One with corruptions, and one with folders.
    settings=(SETTINGS[0], SETTINGS[-1]),
    seeds=(1,),
    options=("--trainer.max_epochs=1", "--training.local_steps=1", "--distillation.steps=1"),
    corruptions=MAIN[:1],
    saved=False,
)


@dataclass(frozen=True)
class HeldOutImages:
    """What the models of all clients give for the held-out images of all clients.

    Attributes:
        targets: Classes (N,).
        owners: The client (N,) of each image.
        personal: Logits (M, N, K) of each client's personal model.
        shared: Logits (N, K) of the global model.
        statistics: Statistics (N, D) by which perada compares images.
        features: Inputs (N, F) of the global model's last layer.
    """

    targets: Tensor
    owners: Tensor
    personal: Tensor
    shared: Tensor
    statistics: Tensor
    features: Tensor


@dataclass(frozen=True)
class TrainingImages:
    """The same for training images of one client, of its own personal model.

    Attributes:
        targets: Classes (R,).
        personal: Logits (R, K) of the client's personal model.
        shared: Logits (R, K) of the global model.
        statistics: Statistics (R, D).
        features: Inputs (R, F) of the global model's last layer.
    """

    targets: Tensor
    personal: Tensor
    shared: Tensor
    statistics: Tensor
    features: Tensor


@dataclass(frozen=True, eq=False)
class RunOutputs:
    """All that a rule of prediction may use of a run, and the targets that score it. Compared by identity.

    Attributes:
        held_out: Held-out images of all clients.
        training: Training images of each client, at most 300.
    """

    held_out: HeldOutImages
    training: Sequence[TrainingImages]

    @property
    def num_clients(self) -> int:
        """The number M."""
        return len(self.training)

    @property
    def is_own(self) -> Tensor:
        """Mask (M, N) of each client's own images."""
        clients = torch.arange(self.num_clients).unsqueeze(1)
        return self.held_out.owners == clients

    def save(self, path: Path, facts: dict[str, str]) -> None:
        """Write tensors to a file, with facts about the run."""
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"facts": facts, "outputs": asdict(self)}, path)

    @classmethod
    def load(cls, path: Path) -> "RunOutputs":
        """Read what :meth:`save` wrote."""
        outputs = torch.load(path, weights_only=True)["outputs"]
        held_out = HeldOutImages(**outputs["held_out"])
        return cls(held_out, [TrainingImages(**client) for client in outputs["training"]])


@cache
def outputs_by_setting(size: Size) -> dict[str, list[RunOutputs]]:
    """Return the outputs of the runs of each setting, one for each seed, trained unless they are saved."""
    outputs: dict[str, list[RunOutputs]] = {}
    for setting in size.settings:
        names = [setting.name, setting.corrupted] if setting.corrupted else [setting.name]
        for seed in size.seeds:
            paths = {name: FOLDER / f"{name.replace(' ', '_')}_seed_{seed}.pt" for name in names}
            if size.saved and all(path.is_file() for path in paths.values()):
                outputs_of_run = {name: RunOutputs.load(path) for name, path in paths.items()}
            else:
                outputs_of_run = _train(setting, seed, size)
                if size.saved:
                    for name, path in paths.items():
                        facts = {"setting": name, "seed": seed, **machine_facts("cpu")}
                        # As text, since the version of torch is an object of its own.
                        outputs_of_run[name].save(path, {key: str(value) for key, value in facts.items()})
            for name in names:
                outputs.setdefault(name, []).append(outputs_of_run[name])
    return outputs


def _train(setting: Setting, seed: int, size: Size) -> dict[str, RunOutputs]:
    """Train a setting, and return the outputs by name: of the held-out images, and of corrupted ones if it has them."""
    words = [*setting.options, *SHARED_OPTIONS, *size.options]
    words += [f"--{option}={seed}" for option in setting.seed_options]
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder, info_messages_disabled(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if setting.own_folders:
            _write_folders(Path(folder), seed)
            words += [f"--data.dataset.root={folder}", f"--data.dataset.size={IMAGE_SIDE}"]
        cli = PeradaCLI(words, run=False)
        cli.trainer.fit(cli.model, cli.datamodule)
        collector = _Collector(cli)
        outputs = {setting.name: collector.outputs(None, ())}
        _check_scores(outputs[setting.name], cli)
        if setting.corrupted:
            outputs[setting.corrupted] = collector.outputs(SEVERITY, size.corruptions)
    return outputs


def _write_folders(folder: Path, seed: int) -> None:
    """Write digits as files: a folder for each device, with a folder for each class. No digit is at two devices."""
    digits = Digits()
    assert digits.images is not None and digits.labels is not None  # the set fits into memory
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(seed))
    for device, rows in zip(FOLDER_DEVICES, order.split(IMAGES_PER_FOLDER), strict=False):
        enlarged = resize_uint8(digits.images[rows], IMAGE_SIDE)
        scanned = scan(enlarged, device, rows.tolist())
        for row, image, label in zip(rows.tolist(), scanned, digits.labels[rows].tolist(), strict=True):
            path = folder / device / str(label) / f"{row:04d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[0].numpy()).save(path)


class _Collector:
    """Runs the models of a finished run on images.

    Args:
        cli: The run.
    """

    def __init__(self, cli: PeradaCLI) -> None:
        self._data: FederatedDataModule = cli.datamodule
        # The networks need the images.
        self._data.use_features(None)
        self._both: BothModels = cli.model.both
        run = cli.loop.outcome(cli.model)
        self._shared = run.global_model().eval()
        self._personal = [run.personal(client).eval() for client in range(run.num_clients)]

    def outputs(self, severity: int | None, kinds: Sequence[str]) -> RunOutputs:
        """Return the outputs of the held-out images, corrupted in each of some ways unless ``severity`` is None."""
        store = self._data.checked.test
        assert store is not None
        conditions = [Condition("", store)]
        if severity is not None:
            conditions = [Condition("corruptions", store, kind, severity) for kind in kinds]
        batches = []
        for condition in conditions:
            batches += [self._data.prepare(batch) for batch in self._data.shift_loader(condition)]
        images = torch.cat([batch.x for batch in batches])
        shared, features = self._shared_outputs(images)
        held_out = HeldOutImages(
            targets=torch.cat([batch.y for batch in batches]),
            owners=torch.cat([batch.owner for batch in batches]),
            personal=torch.stack([_logits(network, images) for network in self._personal]),
            shared=shared,
            statistics=self._both.statistics(images),
            features=features,
        )
        return RunOutputs(held_out, list(self._training_images()))

    def _training_images(self) -> Iterator[TrainingImages]:
        for client, network in enumerate(self._personal):
            examples = list(self._data.examples(client, MAX_EXAMPLES))
            images = torch.cat([x for x, _ in examples])
            shared, features = self._shared_outputs(images)
            yield TrainingImages(
                targets=torch.cat([targets for _, targets in examples]),
                personal=_logits(network, images),
                shared=shared,
                statistics=self._both.statistics(images),
                features=features,
            )

    def _shared_outputs(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the global model's logits (N, K), and the inputs (N, F) of its last layer."""
        inputs_of_batches: list[Tensor] = []

        def keep(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            inputs_of_batches.append(inputs[0])

        hook = self._shared.get_classifier().register_forward_pre_hook(keep)
        try:
            logits = _logits(self._shared, images)
        finally:
            hook.remove()
        return logits, torch.cat(inputs_of_batches).float()


def _logits(network: nn.Module, images: Tensor) -> Tensor:
    """Return the logits (N, K) of images (N, Ch, S, S), in double precision."""
    with torch.no_grad():
        return torch.cat([network(batch).double() for batch in images.split(256)])


def _check_scores(outputs: RunOutputs, cli: PeradaCLI) -> None:
    """Raise a RuntimeError if the outputs give other scores of both models than the run."""
    scores = cli.loop.context.results.per_client
    both: BothModels = cli.model.both
    held_out = outputs.held_out
    clients = range(outputs.num_clients)
    is_typical = both.typical(clients, held_out.statistics)
    weights = both.weights(clients, torch.device("cpu")).of_batches()
    predicted = both.logits(held_out.personal, held_out.shared, is_typical, weights).argmax(-1)
    for client in clients:
        is_right = predicted[client] == held_out.targets
        for name, images in (("local", held_out.owners == client), ("global", torch.ones_like(is_right))):
            found = float(is_right[images].double().mean())
            expected = float(scores[f"both/{name}_test"][client])
            if abs(found - expected) > SCORE_TOLERANCE:
                raise RuntimeError(f"client {client} has both/{name}_test={expected} in the run, and {found} here")
