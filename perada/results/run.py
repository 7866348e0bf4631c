# SPDX-License-Identifier: Apache-2.0
"""What comes out of a run: models, states and metrics, saved and loaded."""

import copy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from perada.core.ranks import this_rank
from perada.core.states import State, clone, set_state
from perada.data.preprocessing import Preprocessing
from perada.models.backbones import AdaptedModel
from perada.models.unwrapping import IMAGE
from perada.results.averaged import Ensemble
from perada.results.export import (
    BACKBONE_FILE,
    CARD_FILE,
    base_name,
    load_adapter,
    load_backbone,
    own_weights,
    read_config,
    save_adapter,
    save_backbone,
)
from perada.results.frames import rounds_frame
from perada.results.hub import push, shared_part
from perada.results.inference import Predictions, client_index, predict
from perada.results.joined import Joined, with_joined
from perada.results.model_card import Subject, write_card
from perada.results.privacy_card import is_test_mode
from perada.results.rebuilding import rebuilt
from perada.results.report import TEST_MODE
from perada.results.run_file import RunFile, read_run, write_run

if TYPE_CHECKING:
    from pandas import DataFrame


class Run:
    """The adapters of all clients and of the server, on one frozen backbone.

    Attributes:
        num_clients: M.
        metrics: ``{"rounds": [{"round": 0, name: value, ...}, ...], "clients": {name: [value of each client]}}``; the
            clients' values are those of the last evaluation. Where corruptions were scored, ``shifts`` holds ``{shift:
            {kind: {"severity": [...], "personal": [...], "personal_std": [...], "global": [...]}}}``. Where known:
            ``initial``, the clients' scores before the first round, by name; ``by_round``, ``{"round": 0,
            "personal/local_test": [...]}`` for each evaluation; ``global/local_test``, the global model's score on each
            client's test images; ``partition``, images (M, K) of each client and class by ``train`` and ``test``;
            ``predictions``, by ``personal`` and ``global`` what :meth:`perada.federation.tally.Tally.record` gives.
        info: What the run was: backbone, weights, number of classes, image size (what images were resized to, or
            ``None``), algorithm, seed (``None`` where the noise of a private run follows from it); ``preprocessing``,
            what was done to images (:class:`perada.data.preprocessing.Preprocessing`); ``privacy`` if it was private,
            as :mod:`perada.results.privacy_card` describes it; the names of ``classes`` and of ``clients``, lists, or
            ``None`` where there are none.
    """

    def __init__(
        self,
        adapted: AdaptedModel,
        global_states: Sequence[State],
        personal_state: Callable[[int], State] | None,
        num_clients: int,
        metrics: dict[str, Any],
        info: dict[str, Any],
    ) -> None:
        self._adapted, self._global, self._personal = adapted, list(global_states), personal_state
        self.num_clients, self.metrics, self.info = num_clients, metrics, info

    def state(self, role: str, client: int | str | None = None) -> State:
        """A copy ``{name in the single model: tensor}`` of one state; :meth:`states` gives all of an ensemble.

        Args:
            role: ``"global"`` or ``"personal"``; where clients have no state of their own, their personal state is the
                global one.
            client: Index or name of the client, for ``"personal"``.

        Raises:
            ValueError: If the role is unknown, the client is missing or does not exist, or there are several states.
        """
        if role not in ("global", "personal"):
            raise ValueError(f"role={role!r} is not kept after a run; ask for 'global' or 'personal'")
        if role == "personal":
            client = self.number(client)
            if self._personal is not None:
                return _contiguous(self._personal(client))
        if len(self._global) > 1:
            raise ValueError(f"the global model averages {len(self._global)} states; ask for states('global')")
        return _contiguous(self._global[0])

    def states(self, role: str) -> list[State]:
        """Copies of all states of a role, as :meth:`state` gives them: of an ensemble, or of all clients left."""
        if role == "global":
            return [_contiguous(state) for state in self._global]
        return [self.state(role, client) for client in self._remaining]

    def number(self, client: int | str | None) -> int:
        """The number of a client, given as such or by name.

        Raises:
            ValueError: If there is no such client, or it was forgotten.
        """
        number = client_index(client, self.info.get("clients"), self.num_clients)
        if number in self.info.get("forgotten", ()):
            raise ValueError(f"client={client!r} was forgotten: the run has no adapter of it; name another client")
        return number

    @property
    def _remaining(self) -> list[int]:
        """The numbers of the clients that were not forgotten."""
        return [client for client in range(self.num_clients) if client not in self.info.get("forgotten", ())]

    def personal(self, client: int | str) -> nn.Module:
        """A client's model, by number or name: a network of its own, in evaluation mode, that maps images to logits.

        Where clients predict with an ensemble of global models, it is that.
        """
        if self._personal is None and len(self._global) > 1:
            return self.global_model()
        return self._model(self.state("personal", client))

    def global_model(self) -> nn.Module:
        """The server's model: a network of its own, in evaluation mode, that maps images to logits.

        Raises:
            ValueError: If the algorithm has none: clients keep a part of the model, or all of it.
        """
        if not self.info.get("global_model", True):
            raise ValueError(
                f"{self.info['algorithm']} has no global model: what the server holds is the initial one, but for what "
                "clients share; ask for personal(client)"
            )
        members = [self._model(state) for state in self.states("global")]
        if len(members) == 1:
            return members[0]
        return Ensemble(members, self.info["average"], self.info["multilabel"]).eval()

    def history(self) -> "DataFrame":
        """The rounds as a pandas frame: a row for each, by its number ``round`` from 0, and a column for each metric.

        A metric that a round lacks, such as a score where nothing was evaluated, is NaN.

        Raises:
            ModuleNotFoundError: If pandas is not installed.
        """
        return rounds_frame(self.metrics["rounds"])

    @property
    def preprocessing(self) -> Preprocessing:
        """What makes images ready for the models, as training did.

        Raises:
            ValueError: If the run was saved before perada kept that.
        """
        record = self.info.get("preprocessing")
        if record is None:
            raise ValueError(
                "run.info has no 'preprocessing', since an earlier perada made the run: how its images were resized is "
                "not known; `perada export` of its run folder finds it out, or prepare images yourself for personal()"
            )
        return Preprocessing.of_record(record)

    def predict(
        self,
        images: Any,  # noqa: ANN401  # one image of any kind, or several
        client: int | str | None = None,
        *,
        batch_size: int = 64,
        device: torch.device | str = "cpu",
        progress: bool = False,
    ) -> Predictions:
        """Predict with a client's model or the global one, for images as they come.

        Args:
            images: A path, a PIL image, an array (H, W) or (H, W, channels), or a tensor (channels, H, W); a list of
                these; or a batch of four axes. uint8 images are resized and normalised as in training
                (:class:`perada.data.preprocessing.Preprocessing`); floating-point ones are taken as ready for the
                model, as in training too.
            client: Its number or its name; None for the global model.
            batch_size: Images in memory at a time, and in a pass through the model.
            device: Where the model runs.
            progress: Show a bar.

        Raises:
            FileNotFoundError: If a file does not exist.
            ValueError: If a file or an image cannot be used, the client does not exist, or there is no global model.
            TypeError: If something is no image.
        """
        preprocessing = self.preprocessing
        number = None if client is None else self.number(client)
        model = self.global_model() if number is None else self.personal(number)
        return predict(
            model,
            preprocessing,
            images,
            classes=self.info.get("classes") or list(map(str, range(self.info["num_classes"]))),
            multilabel=self.info["multilabel"],
            batch_size=batch_size,
            device=device,
            progress=progress,
        )

    @property
    def personalized(self) -> bool:
        """Whether clients have states of their own."""
        return self._personal is not None

    def merged(self, client: int | None) -> nn.Module:
        """A client's model, or the global one (None), with the adapter merged into the backbone's weights by PEFT.

        Raises:
            NotImplementedError: If the adapter's method has no such thing; PEFT raises other errors too.
        """
        state = self.state("global") if client is None else self.state("personal", client)
        copied = copy.deepcopy(self._adapted.peft_model).to(memory_format=torch.contiguous_format)
        set_state(copied.get_base_model(), state)
        model: nn.Module = copied.merge_and_unload(safe_merge=True)
        return model.eval()

    def adapted(self) -> AdaptedModel:
        """A copy of the backbone with its adapter, in the global state.

        Raises:
            ValueError: If there are several global states.
        """
        copied = copy.deepcopy(self._adapted)
        set_state(copied.model, self.state("global"))
        return copied

    def with_client(self, joined: Joined) -> "Run":
        """This run with one more client, whose number is the last; this one stays as it is.

        ``info["joined"]`` has a record of each client that came so.
        """
        number, earlier = self.num_clients, self._personal
        info, metrics = with_joined(self.info, self.metrics, number, joined)

        def personal(client: int) -> State:
            if client == number:
                return joined.state
            return self._global[0] if earlier is None else earlier(client)

        return Run(self._adapted, self._global, personal, number + 1, metrics, info)

    def _model(self, state: State) -> nn.Module:
        model = copy.deepcopy(self._adapted.model).to(memory_format=torch.contiguous_format)
        set_state(model, state)
        setattr(model, IMAGE, self._adapted.backbone.image)
        return model.eval()

    def save(self, folder: str | Path, *, client: int | str | None = None, license: str = "unknown") -> Path:
        """Write one PEFT folder per client (``client_0`` …) and ``global``, with what it takes to load them.

        An ensemble is written as ``global_0`` …; clients that predict with it have no folder. The frozen backbone is
        written only where its weights cannot be had elsewhere (random, from a file, or a network of your own), under
        the names that it has without adapters.
        Of several processes only rank 0 writes.

        With a ``client``, by number or name, only its folder is written, for PEFT: :meth:`load` needs all. Each folder
        has a model card, ``README.md``; ``license`` is that of the adapters, as the Hub writes licences (``mit``).
        """
        folder = Path(folder)
        only = None if client is None else self.number(client)
        if this_rank():
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        privacy, personal = self.info.get("privacy"), self._personal is not None
        if is_test_mode(privacy):
            warnings.warn(f"{str(folder)!r}: {TEST_MODE}", stacklevel=2)
        if only is None:
            for name, state in zip(_global_folders(len(self._global)), self._global, strict=True):
                self._export(state, folder / name, None, license)
        every = self._remaining if personal or len(self._global) == 1 else []
        for one in every if only is None else [only]:
            self._export(self.state("personal", one), folder / f"client_{one}", one, license)
        if own_weights(self.info):
            save_backbone(self._adapted, folder)
        if only is None:
            self._write_file(folder)
        return folder

    def _export(self, state: State, folder: Path, client: int | None, license: str, backbone: str = "..") -> None:
        """Write one adapter and its card; the backbone, if it is written, is in the folder ``backbone`` from there."""
        base, card = base_name(self._adapted, self.info["pretrained"]), folder / CARD_FILE
        blank, where = not card.is_file(), f"{backbone}/{BACKBONE_FILE}" if own_weights(self.info) else None
        where = BACKBONE_FILE if self._adapted.beside else where
        save_adapter(self._adapted, state, folder, classes=self.info.get("classes"), base=base)
        subject = Subject(self.info, self.metrics, client, self._personal is not None, base, where, license)
        write_card(card, subject, blank)

    def add_client(self, folder: str | Path, client: int | str) -> Path:
        """Write a client that joined into the folder of the run that it joined; no other file but run.json changes."""
        folder = self.save(folder, client=client)
        self._write_file(folder)
        return folder

    def _write_file(self, folder: Path) -> None:
        shared = self._personal is None
        write_run(folder, RunFile(self.info, self.metrics, self.num_clients, len(self._global), shared))

    def push_to_hub(
        self,
        repo: str,
        *,
        client: int | str | None = None,
        private: bool = True,
        license: str = "unknown",
        token: str | None = None,
    ) -> str:
        """Upload the global adapter or, where it is named, one client's, to a repository of the Hugging Face Hub.

        It is laid out as PEFT lays out an adapter, with a model card, and ``run.json``, which says nothing of other
        clients. A line on standard error says what leaves. Weights of the backbone go along where they cannot be had
        elsewhere.

        Args:
            repo: Name of the repository, ``user/name``; it is made if it does not exist.
            client: Number or name of the client. No personal adapter is uploaded unless its client is named.
            private: Make a private repository.
            license: Of the adapter, as the Hub writes licences.
            token: Of the Hub; by default that of ``hf auth login``.

        Returns:
            The address of the repository.

        Raises:
            ValueError: If there is no such client, or no global model, or several.
        """
        number = None if client is None else self.number(client)
        if number is None and not self.info.get("global_model", True):
            raise ValueError(f"{self.info['algorithm']} has no global model to upload; name a client")
        state = self.state("global") if number is None else self.state("personal", number)

        def write(folder: Path) -> None:
            self._export(state, folder, number, license, ".")
            if own_weights(self.info) and not self._adapted.beside:  # which is there already
                save_backbone(self._adapted, folder)
            write_run(folder, shared_part(self.info, self.metrics, self.num_clients, number))

        whose = "the global adapter" if number is None else f"the adapter of client {client}"
        return push(write, repo, whose, self.info, private, token)

    @classmethod
    def from_hub(
        cls, repo: str, *, revision: str | None = None, token: str | None = None, backbone: nn.Module | None = None
    ) -> "Run":
        """Load what :meth:`push_to_hub` uploaded: a run whose one adapter is both global and every client's.

        Args:
            repo: Name of the repository.
            revision: A branch, a tag or a commit.
            token: Of the Hub.
            backbone: As in :meth:`load`, which also says what is refused.
        """
        from huggingface_hub import snapshot_download

        return cls.load(snapshot_download(repo, revision=revision, token=token), backbone=backbone)

    @classmethod
    def load(cls, folder: str | Path, *, backbone: nn.Module | None = None) -> "Run":
        """Read what :meth:`save` wrote.

        Args:
            folder: The run's folder.
            backbone: The network, where the run was made with one of your own.

        Raises:
            FileNotFoundError: If there is no run in ``folder``, or an adapter is missing.
            ValueError: If an adapter is broken or foreign, or the backbone is missing.
        """
        folder = Path(folder)
        saved = read_run(folder)
        info, clients, models = saved.info, saved.num_clients, saved.global_models
        built = rebuilt(folder, info, backbone)
        if not (folder / f"global_{models - 1}").is_dir() and models > 1:  # before a list of a billion names is made
            raise FileNotFoundError(f"{str(folder)!r} lacks 'global_{models - 1}'; copy the whole folder")
        alone = models == 1 and not (folder / "global").is_dir() and (folder / "adapter_config.json").is_file()
        names = ["."] if alone else _global_folders(models)  # alone, as on the Hub
        config = read_config(folder / names[0])
        adapted = load_backbone(built, config, folder, info.get("train_backbone", False))
        shared = [load_adapter(adapted, folder / name, config) for name in names]
        if saved.shared:
            return cls(adapted, shared, None, clients, saved.metrics, info)
        remaining = sorted({*range(clients)} - {*info.get("forgotten", ())})
        states = {client: load_adapter(adapted, folder / f"client_{client}", config) for client in remaining}
        return cls(adapted, shared, states.__getitem__, clients, saved.metrics, info)


def _global_folders(models: int) -> list[str]:
    return ["global"] if models == 1 else [f"global_{index}" for index in range(models)]


def _contiguous(state: State) -> State:
    return {key: value.contiguous() for key, value in clone(state).items()}
