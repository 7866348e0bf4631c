# SPDX-License-Identifier: Apache-2.0
"""What comes out of a run: models and metrics, saved, loaded and shared."""

import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from perada.algorithms import Algorithm
from perada.core.digests import digest_of, write_sums
from perada.core.ranks import this_rank
from perada.core.states import State
from perada.data.preprocessing import Preprocessing
from perada.results.cards import UNKNOWN, Cards, check_record, is_test_mode, protection
from perada.results.clients import with_joined
from perada.results.export import (
    BACKBONE_FILE,
    CARD_FILE,
    CONFIG_FILE,
    NAMES_FILE,
    WEIGHTS_FILE,
    PeftFolders,
    base_name,
    own_weights,
    push,
    read_config,
    save_backbone,
    shared_part,
)
from perada.results.models import Models
from perada.results.report import TEST_MODE
from perada.results.restore import rebuilt, restored
from perada.results.run_file import (
    RUN_FILE,
    RunFile,
    check_files,
    finish,
    holds_adapters,
    naming,
    published,
    read_run,
    together,
    write_run,
)


class Run(Models):
    """The adapters of all clients and of the server, on one frozen backbone, and how they are kept.

    :class:`perada.results.models.Models` says what ``num_clients``, ``metrics`` and ``info`` hold.
    """

    def with_client(self, alone: "Run", how: dict[str, Any]) -> "Run":
        """This run with one more client, whose number is the last; this one stays as it is.

        Args:
            alone: The run of that client alone.
            how: How it came, with its ``name``, for ``info["joined"]``.
        """
        number, earlier, state = self.num_clients, self._personal, alone.state("personal", 0)
        info, metrics = with_joined(self, alone, how)

        def personal(client: int) -> State:
            if client == number:
                return state
            return self._global[0] if earlier is None else earlier(client)

        return Run(self._adapted, self._global, personal, number + 1, metrics, info)

    def save(
        self,
        folder: str | Path,
        *,
        client: int | str | None = None,
        license: str = UNKNOWN,
        scores: bool | None = None,
    ) -> Path:
        """Write one PEFT folder per client (``client_0`` …) and ``global``, with what it takes to load them.

        An ensemble is written as ``global_0`` …; clients that predict with it have no folder. The frozen backbone is
        written only where its weights cannot be had elsewhere (random, from a file, or a network of your own), under
        the names that it has without adapters.
        Of several processes only rank 0 writes.

        With a ``client``, by number or name, only its folder is written, for PEFT: :meth:`load` needs all. Each folder
        has a model card, ``README.md``; ``license`` is that of the adapters, as the Hub writes licences (``mit``).

        ``scores`` says whether scores, losses and diagnostics are in the cards and in ``run.json``. By default those of
        a private run are not: they follow from clients' images, and ε does not cover them.
        """
        folder = Path(folder)
        only = None if client is None else self.number(client)
        if this_rank():
            return folder
        self._warn_of_test_mode(folder)
        shown = self._shows_scores(scores)
        with together(folder) as stage:
            if only is not None:
                self._write(stage, folder, [(f"client_{only}", only)], license, shown)
            else:
                self._describe(stage, self._write(stage, folder, self._folders(), license, shown), shown)
        return folder

    def add_client(self, folder: str | Path, client: int | str, *, scores: bool | None = None) -> Path:
        """Write a client that joined into the folder of the run that it joined; no other file but run.json changes.

        ``scores`` is as of :meth:`save`.
        """
        folder, number = Path(folder), self.number(client)
        shown = self._shows_scores(scores)
        if not this_rank():
            with together(folder) as stage:
                files = self._write(stage, folder, [(f"client_{number}", number)], scores=shown)
                self._describe(stage, read_run(folder).files | files, shown)
        return folder

    def _shows_scores(self, scores: bool | None) -> bool:
        """Whether scores are written: as was asked for, or by default those of runs that are not private."""
        return not self.info.get("privacy") if scores is None else scores

    def _folders(self) -> Iterator[tuple[str, int | None]]:
        """The names of all adapters' folders, with the client or, of a global one, None."""
        if "adapter_of" in self.info:
            yield "", 0  # alone, as on the Hub
            return
        yield from ((name, None) for name in _global_folders(len(self._global)))
        if self._personal is not None or len(self._global) == 1:
            yield from ((f"client_{client}", client) for client in self._remaining)

    def _write(
        self,
        stage: Path,
        former: Path,
        folders: Iterable[tuple[str, int | None]],
        license: str = UNKNOWN,
        scores: bool = True,
    ) -> dict[str, str]:
        """Write adapters with their cards and digests, and the backbone; return the digests of all tensors' files.

        What somebody wrote into a card in the folder of before, ``former``, stays.
        """
        base, own, adapted = base_name(self._adapted, self.info["pretrained"]), own_weights(self.info), self._adapted
        files, written, cards = {}, PeftFolders(adapted, base), Cards(self, base, scores, license)
        names = [NAMES_FILE] * bool(self.info.get("classes")) + [BACKBONE_FILE] * bool(adapted.beside)
        names = [CARD_FILE, *names, CONFIG_FILE, WEIGHTS_FILE]
        if own:
            save_backbone(adapted, stage)
        for place, (name, client) in enumerate(folders):
            state = self._global[place] if client is None else self.state("personal", client)
            folder, card = stage / name, former / name / CARD_FILE
            folder.mkdir(exist_ok=True)
            if card.is_file() and not card.is_symlink() and not card.parent.is_symlink():
                shutil.copyfile(card, folder / CARD_FILE)
            where = BACKBONE_FILE if adapted.beside or not name else f"../{BACKBONE_FILE}"
            cards.write(folder / CARD_FILE, client, where if own or adapted.beside else None)
            written.save(state, folder, self.info.get("classes"), _rank(self.info, client))
            digests = write_sums(folder, names)
            files[f"{name}/{WEIGHTS_FILE}".lstrip("/")] = digests[WEIGHTS_FILE]
        return files | ({BACKBONE_FILE: digest_of(stage / BACKBONE_FILE)} if own else {})

    def _warn_of_test_mode(self, where: object) -> None:
        if is_test_mode(self.info.get("privacy")):
            warnings.warn(f"{str(where)!r}: {TEST_MODE}", stacklevel=3)

    def _describe(self, folder: Path, files: dict[str, str], scores: bool) -> None:
        shared = self._personal is None or "adapter_of" in self.info
        info, metrics = (self.info, self.metrics) if scores else published(self.info, self.metrics)
        content = RunFile(self.num_clients, info, metrics, len(self._global), shared, files=files)
        write_run(folder, content)

    def push_to_hub(
        self,
        repo: str,
        *,
        client: int | str | None = None,
        private: bool = True,
        license: str = UNKNOWN,
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
        if number is None:
            if not self.info["global_model"]:
                raise ValueError(f"{self.info['algorithm']} has no global model to upload; name a client")
            self.state("global")  # an error where there are several
        privacy = self.info.get("privacy")
        told = self._shows_scores(scores)
        self._warn_of_test_mode(repo)

        def write(folder: Path) -> None:
            self._write(folder, folder, [("", number)], license, told)
            write_run(folder, shared_part(self.info, self.metrics, self.num_clients, number, told))

        whose = "the global adapter" if number is None else f"the adapter of client {client}"
        own = number if number in self.own_clients() else None
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
        finish(folder)
        if not holds_adapters(folder):
            return cls(*restored(folder, algorithm, backbone))
        saved = read_run(folder)
        info, metrics, clients = saved.info, saved.metrics, saved.num_clients
        with naming(folder / RUN_FILE):
            check_record(info.get("privacy") or {}, clients)
            Preprocessing.from_record(info["preprocessing"])
        check_files(folder, saved.files)
        models = saved.global_models
        alone = models == 1 and not (folder / "global").is_dir() and (folder / CONFIG_FILE).is_file()  # as on the Hub
        config = read_config(folder if alone else folder / next(_global_folders(models)))
        adapted = rebuilt(folder, info, backbone, config)
        folders = PeftFolders(adapted)
        shared = [folders.load(folder / name, config) for name in (["."] if alone else _global_folders(models))]
        if "adapter_of" in info:
            return cls(adapted, shared, lambda _: shared[0], clients, metrics, info)
        gone = {*info.get("forgotten", ()), *info.get("elsewhere", ())}
        left = range(0 if saved.shared else clients)
        states = {
            client: folders.load(folder / f"client_{client}", config, _rank(info, client))
            for client in left
            if client not in gone
        }
        return cls(adapted, shared, None if saved.shared else states.__getitem__, clients, metrics, info)


def _global_folders(models: int) -> Iterator[str]:
    """One by one: a broken file may name millions, of which the first is missing."""
    return (f"global_{place}" if models > 1 else "global" for place in range(models))


def _rank(info: Mapping[str, Any], client: int | None) -> int | None:
    """A client's rank of LoRA; None if it is the adapter's, as that of clients that joined."""
    ranks = info.get("lora_ranks", [])
    return None if client is None or client >= len(ranks) else ranks[client]
