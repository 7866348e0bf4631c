# SPDX-License-Identifier: Apache-2.0
"""What comes out of a run: models and metrics, saved, loaded and shared."""

import warnings
from pathlib import Path

from torch import nn

from perada.core.ranks import this_rank
from perada.core.states import State
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
from perada.results.hub import push, shared_part
from perada.results.joined import Joined, with_joined
from perada.results.model_card import Subject, write_card
from perada.results.models import Models
from perada.results.privacy_card import is_test_mode
from perada.results.rebuilding import rebuilt
from perada.results.report import TEST_MODE
from perada.results.run_file import RunFile, read_run, write_run


class Run(Models):
    """The adapters of all clients and of the server, on one frozen backbone, and how they are kept.

    :class:`perada.results.models.Models` says what ``num_clients``, ``metrics`` and ``info`` hold.
    """

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
