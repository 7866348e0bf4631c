# SPDX-License-Identifier: Apache-2.0
"""What comes out of a run: models and metrics, saved, loaded and shared."""

import shutil
import warnings
from pathlib import Path

from torch import nn

from perada.algorithms import Algorithm
from perada.core.files import digest_of, write_sums
from perada.core.ranks import this_rank
from perada.core.states import State
from perada.results.clients import Joined, with_joined
from perada.results.export import (
    BACKBONE_FILE,
    CARD_FILE,
    CONFIG_FILE,
    NAMES_FILE,
    WEIGHTS_FILE,
    PeftLayout,
    base_name,
    load_adapter,
    load_backbone,
    own_weights,
    push,
    read_config,
    save_adapter,
    save_backbone,
    shared_part,
)
from perada.results.model_card import Subject, write_card
from perada.results.models import Models
from perada.results.privacy_card import is_test_mode, protection
from perada.results.report import TEST_MODE
from perada.results.restore import checkpoint_in, rebuilt, restored
from perada.results.run_file import (
    RUN_FILE,
    RunFile,
    check_files,
    finish,
    holds_adapters,
    read_run,
    together,
    write_run,
)


class Run(Models):
    """The adapters of all clients and of the server, on one frozen backbone, and how they are kept.

    :class:`perada.results.models.Models` says what ``num_clients``, ``metrics`` and ``info`` hold.
    """

    def with_client(self, joined: Joined) -> "Run":
        """This run with one more client, whose number is the last; this one stays as it is.

        ``info["joined"]`` has a record of each client that came so.
        """
        number, earlier = self.num_clients, self._personal
        info, metrics = with_joined(self.info, self.metrics, number, joined, earlier is None)

        def personal(client: int) -> State:
            if client == number:
                return joined.state
            return self._global[0] if earlier is None else earlier(client)

        return Run(self._adapted, self._global, personal, number + 1, metrics, info)

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
        if is_test_mode(self.info.get("privacy")):
            warnings.warn(f"{str(folder)!r}: {TEST_MODE}", stacklevel=2)
        with together(folder) as stage:
            files = self._write(stage, folder, only, license)
            if only is None:
                self._describe(stage, files)
        return folder

    def _write(self, stage: Path, folder: Path, only: int | None, license: str) -> dict[str, str]:
        """Write the adapters of all or of one client, and the backbone, into a stage for ``folder``; return digests."""
        adapters: list[tuple[str, int | None]] = []
        if only is not None:
            adapters = [(f"client_{only}", only)]
        else:
            adapters = [(name, None) for name in _global_folders(len(self._global))]
            if self._personal is not None or len(self._global) == 1:
                adapters += [(f"client_{client}", client) for client in self._remaining]
        if "adapter_of" in self.info:
            adapters = [("", 0)]  # alone, as on the Hub
        files, layout = {}, self._layout()
        for place, (name, client) in enumerate(adapters):
            state = self._global[place] if client is None else self.state("personal", client)
            card = folder / name / CARD_FILE
            if card.is_file() and not (card.is_symlink() or card.parent.is_symlink()):  # what somebody wrote stays
                (stage / name).mkdir(exist_ok=True)
                shutil.copyfile(card, stage / name / CARD_FILE)
            backbone = ".." if name else "."
            digest = self._export(state, stage / name, client, license, layout, backbone)
            files[f"{name}/{WEIGHTS_FILE}".lstrip("/")] = digest
        if own_weights(self.info):
            save_backbone(self._adapted, stage)
            files[BACKBONE_FILE] = digest_of(stage / BACKBONE_FILE)
        return files

    @property
    def _base(self) -> str | None:
        return base_name(self._adapted, self.info["pretrained"])

    def _layout(self) -> PeftLayout:
        return PeftLayout(self._adapted, self._base, texts=True)

    def _export(
        self,
        state: State,
        folder: Path,
        client: int | None,
        license: str,
        layout: PeftLayout,
        backbone: str,
        scores: bool = True,
    ) -> str:
        """Write one adapter, its card and digests of all; return that of its tensors.

        The backbone, if it is written, is in the folder ``backbone`` from there.
        """
        base, card = self._base, folder / CARD_FILE
        blank, where = not card.is_file(), f"{backbone}/{BACKBONE_FILE}" if own_weights(self.info) else None
        where = BACKBONE_FILE if self._adapted.beside else where
        save_adapter(self._adapted, state, folder, classes=self.info.get("classes"), layout=layout)
        own = client is not None and self.own(client)
        subject = Subject(self.info, self.metrics if scores else None, client, own, base, where, license)
        write_card(card, subject, blank)
        names = [name for name in (CARD_FILE, NAMES_FILE, BACKBONE_FILE) if (folder / name).is_file()]
        return write_sums(folder, [*names, CONFIG_FILE, WEIGHTS_FILE])[WEIGHTS_FILE]

    def add_client(self, folder: str | Path, client: int | str) -> Path:
        """Write a client that joined into the folder of the run that it joined; no other file but run.json changes."""
        folder = Path(folder)
        if not this_rank():
            with together(folder) as stage:
                files = self._write(stage, folder, self.number(client), Subject.license)
                self._describe(stage, read_run(folder).files | files)
        return folder

    def _describe(self, folder: Path, files: dict[str, str]) -> None:
        shared = self._personal is None or "adapter_of" in self.info
        write_run(folder, RunFile(self.info, self.metrics, self.num_clients, len(self._global), shared, files))

    def push_to_hub(
        self,
        repo: str,
        *,
        client: int | str | None = None,
        private: bool = True,
        license: str = "unknown",
        scores: bool | None = None,
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
            scores: Whether its scores go along. By default not those of a private run: they follow from clients'
                images, and ε does not cover them.
            token: Of the Hub; by default that of ``hf auth login``.

        Returns:
            The address of the repository.

        Raises:
            ValueError: If there is no such client, or no global model, or several; or if the repository is to be
                private, exists, and is public.
        """
        number = None if client is None else self.number(client)
        if number is None and not self.info.get("global_model", True):
            raise ValueError(f"{self.info['algorithm']} has no global model to upload; name a client")
        state = self.state("global") if number is None else self.state("personal", number)

        def write(folder: Path) -> None:
            if own_weights(self.info) and not self._adapted.beside:  # which is there already
                save_backbone(self._adapted, folder)
            self._export(state, folder, number, license, self._layout(), ".", told)
            write_run(folder, shared_part(self.info, self.metrics, self.num_clients, number, told))

        privacy = self.info.get("privacy")
        told = not privacy if scores is None else scores
        if is_test_mode(privacy):
            warnings.warn(f"{repo!r}: {TEST_MODE}", stacklevel=2)
        whose = "the global adapter" if number is None else f"the adapter of client {client}"
        own = number if number is not None and self.own(number) else None
        what = f"{whose}: its weights, {'scores, ' if told else ''}names of classes and how it was trained; no images"
        return push(write, repo, f"{what}. It was trained {protection(privacy, own)}.", private, token)

    @classmethod
    def from_hub(
        cls, repo: str, *, revision: str | None = None, token: str | None = None, backbone: nn.Module | None = None
    ) -> "Run":
        """Load what :meth:`push_to_hub` uploaded: the global adapter, which is every client's too, or one client's.

        A client's adapter is that of client 0, and there is no global one then.

        Args:
            repo: Name of the repository.
            revision: A branch, a tag or a commit.
            token: Of the Hub.
            backbone: As in :meth:`load`, which also says what is refused.
        """
        from huggingface_hub import snapshot_download

        return cls.load(snapshot_download(repo, revision=revision, token=token), backbone=backbone)

    @classmethod
    def load(
        cls, folder: str | Path, *, algorithm: Algorithm | None = None, backbone: nn.Module | None = None
    ) -> "Run":
        """Read a run: what :meth:`save` wrote, what a fit left in its folder, or one of its checkpoints.

        Of a fit's folder the newest whole checkpoint counts. The folder stays as it is.

        Args:
            folder: The run's folder, such as ``lightning_logs/version_0``, or a checkpoint file.
            algorithm: That of a fit, where it is not perada's own.
            backbone: The network, where the run was made with one of your own.

        Raises:
            FileNotFoundError: If there is no run in ``folder``, or an adapter is missing.
            ValueError: If an adapter is broken or foreign, or the backbone is missing.
        """
        folder = Path(folder)
        if folder.is_dir():
            finish(folder)
        if not holds_adapters(folder):
            return cls(*restored(_checkpoint(folder), algorithm, backbone))
        saved = read_run(folder)
        info, clients, models = saved.info, saved.num_clients, saved.global_models
        check_files(folder, saved.files)
        built = rebuilt(folder, info, backbone)
        if not (folder / f"global_{models - 1}").is_dir() and models > 1:  # before a list of a billion names is made
            raise FileNotFoundError(f"{str(folder)!r} lacks 'global_{models - 1}'; copy the whole folder")
        alone = models == 1 and not (folder / "global").is_dir() and (folder / "adapter_config.json").is_file()
        names = ["."] if alone else _global_folders(models)  # alone, as on the Hub
        config = read_config(folder / names[0])
        adapted = load_backbone(built, config, folder, info.get("train_backbone", False))
        layout = PeftLayout(adapted)
        shared = [load_adapter(adapted, folder / name, config, layout) for name in names]
        if "adapter_of" in info:
            return cls(adapted, shared, lambda _: shared[0], clients, saved.metrics, info)
        if saved.shared:
            return cls(adapted, shared, None, clients, saved.metrics, info)
        gone = {*info.get("forgotten", ())}
        last = next((client for client in range(clients - 1, -1, -1) if client not in gone), None)
        if last is not None and not (folder / f"client_{last}").is_dir():  # before a list of a billion is made
            raise FileNotFoundError(f"{str(folder)!r} lacks 'client_{last}'; copy the whole folder")
        remaining = [client for client in range(clients) if client not in gone]
        states = {client: load_adapter(adapted, folder / f"client_{client}", config, layout) for client in remaining}
        return cls(adapted, shared, states.__getitem__, clients, saved.metrics, info)


def _checkpoint(path: Path) -> Path:
    """A checkpoint file, or the newest whole one of a fit's folder."""
    found = checkpoint_in(path)
    if found is not None:
        return found
    if (path / CONFIG_FILE).is_file() and (path.absolute().parent / RUN_FILE).is_file():
        raise FileNotFoundError(
            f"{str(path)!r} is one adapter of a run; give the folder that it is in, {str(path.parent)!r}, and choose "
            "the client"
        )
    raise FileNotFoundError(
        f"{str(path)!r} is not a finished run: it has neither adapters beside a {RUN_FILE} nor a whole checkpoint; "
        "give a folder that `perada fit` or Run.save wrote"
    )


def _global_folders(models: int) -> list[str]:
    return ["global"] if models == 1 else [f"global_{index}" for index in range(models)]
