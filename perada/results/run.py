# SPDX-License-Identifier: Apache-2.0
"""The result of a run: models and metrics, which can be saved, loaded and shared."""

import shutil
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from perada.algorithms import Algorithm
from perada.core.checks import OptionError, check_choice, check_name, check_type, checked_path
from perada.core.ranks import this_rank
from perada.core.states import State, get_state
from perada.data.preprocessing import Preprocessing
from perada.federation.typical_images import ComparedMap, padded_states
from perada.models.adapted import warn_of_ends
from perada.results.cards import (
    PREDICTIONS_IN_CODE,
    UNKNOWN,
    BothFiles,
    Cards,
    check_record,
    is_test_mode,
    protection,
)
from perada.results.clients import with_joined
from perada.results.export import (
    BACKBONE_FILE,
    CARD_FILE,
    CLASS_NAMES_FILE,
    CONFIG_FILE,
    WEIGHTS_FILE,
    PeftFolders,
    base_name,
    is_of_perada,
    load_typical,
    needs_backbone_file,
    parse_config,
    push_folder,
    read_config,
    save_backbone,
    save_typical,
    shared_run_file,
)
from perada.results.models import Models, both_predictor
from perada.results.overwriting import check_saved_run
from perada.results.report import TEST_MODE
from perada.results.restore import rebuilt, restored
from perada.results.run_file import (
    FIXED,
    GLOBAL,
    PERSONAL,
    RUN_FILE,
    TYPICAL,
    TYPICAL_FILE,
    Layout,
    RunFile,
    StateIndex,
    check_files,
    finish_interrupted_move,
    layout_of,
    naming,
    published,
    read_run,
    together,
    write_run,
)
from perada.results.state_files import StateFiles, delete_unlisted, write_states
from perada.system.digests import digest_of, write_sums
from perada.system.files import check_output_folder


class Run(Models):
    """The adapters of all clients and of the server on one frozen backbone.

    ``num_clients``, ``metrics`` and ``info`` are described at :class:`perada.results.models.Models`.

    >>> run = Run.load("my_run")  # doctest: +SKIP
    >>> run.predict(images, "north")  # doctest: +SKIP
    >>> run.export("adapters")  # doctest: +SKIP
    """

    def with_client(self, single: "Run", record: dict[str, Any]) -> "Run":
        """Return a copy of this run with one more client, which gets the last number.

        Args:
            single: The run of the new client only.
            record: The client's entry in ``info["joined"]``, with its ``name``.
        """
        new_client = self.num_clients
        new_state = single.state("personal", 0)
        other_states = self._personal
        info, metrics = with_joined(self, single, record)

        def personal(client: int) -> State:
            if client == new_client:
                return new_state
            if other_states is None:
                return self._global[0]
            return other_states(client)

        def state_of_both(client: int) -> State | None:
            return single.state_of_both(0) if client == new_client else self.state_of_both(client)

        return Run(self._adapted, self._global, personal, new_client + 1, metrics, info, state_of_both)

    def save(
        self,
        folder: str | Path,
        *,
        license: str = UNKNOWN,
        scores: bool | None = None,
    ) -> Path:
        """Write everything that :meth:`load` needs, in a few files for any number of clients.

        The states of the clients are the rows of ``personal.safetensors`` (several files, ``personal_2.safetensors``
        and so on, beyond 2 GB), those of the global models the rows of ``global.safetensors``; ``run.json`` lists the
        client of each row. The frozen backbone is written only if its weights cannot be downloaded (random, from a
        file, or your own network), under its names without adapters. ``README.md`` describes the run. For folders that
        PEFT reads, see :meth:`export`. With several processes only rank 0 writes.

        Args:
            folder: The folder.
            license: Licence of the adapters in the Hub's notation, such as ``mit``.
            scores: Whether scores, losses and diagnostics are written to ``README.md`` and ``run.json``. By default not
                for a private run: they depend on the clients' images, and ε does not cover them.

        Raises:
            FileExistsError: If a file would be replaced that perada did not write.
            ValueError: If the folder has a run that :meth:`export` wrote.
        """
        folder = _checked_output(folder, license, scores)
        if this_rank():
            return folder
        self._warn_of_test_mode(folder)
        _check_layout(folder, "states")
        with together(folder) as stage:
            digests = self._write_shared_files(stage)
            states = write_states(stage, GLOBAL, range(len(self._global)), self._global.__getitem__)
            fixed = PeftFolders(self._adapted).fixed
            if fixed:
                states |= write_states(stage, FIXED, [0], lambda _: fixed)
            if self._personal is not None:
                own_clients = self.own_clients()
                clients = [client for client in self._remaining_clients if client in own_clients]
                states |= write_states(stage, PERSONAL, clients, self._personal)
            states |= self._write_states_of_both(stage)
            self._write_card(stage, folder, license, self._with_scores(scores))
            self._write_run_file(stage, digests, self._with_scores(scores), states)
        delete_unlisted(folder, states)
        return folder

    def export(
        self,
        folder: str | Path,
        *,
        client: int | str | None = None,
        prediction: Literal["personal", "both"] | None = None,
        license: str = UNKNOWN,
        scores: bool | None = None,
    ) -> Path:
        """Write one PEFT folder per client (``client_0`` …) and ``global``, with everything that :meth:`load` needs.

        An ensemble is written as ``global_0`` …; clients that predict with it have no folder. The frozen backbone is
        written only if its weights cannot be downloaded (random, from a file, or your own network), under its names
        without adapters. Each folder has a model card, ``README.md``. With several processes only rank 0 writes.

        Args:
            folder: The folder.
            client: Number or name of a client to write only its folder, for PEFT; :meth:`load` needs all folders.
            prediction: ``both`` also writes what clients need to predict with both models (docs/prediction.md): the
                file ``typical.safetensors`` in each client's folder, with statistics of its training images, a part of
                the card with code, and with ``client`` also the folder ``global``. By default as in the option
                ``evaluation.prediction`` of the run.
            license: Licence of the adapters in the Hub's notation, such as ``mit``.
            scores: Whether scores, losses and diagnostics are written to the cards and to ``run.json``. By default not
                for a private run: they depend on the clients' images, and ε does not cover them.

        Raises:
            FileExistsError: If a file would be replaced that perada did not write.
            OptionError: If ``prediction`` is ``both``, and a client cannot predict so, or not without perada.
            ValueError: If the folder has a run that :meth:`save` wrote.
        """
        folder = _checked_output(folder, license, scores)
        check_choice("prediction", prediction, [None, "personal", "both"])
        number = None if client is None else self.number(client)
        clients_with_both = self._clients_with_both(number, prediction)
        if this_rank():
            return folder
        self._warn_of_test_mode(folder)
        _check_layout(folder, "adapters")
        with_scores = self._with_scores(scores)
        folders = list(self._adapter_folders())
        if number is not None:
            folders = [("global", None)] if clients_with_both else []
            folders.append((f"client_{number}", number))
        with together(folder) as stage:
            digests = self._write_adapters(stage, folder, folders, license, with_scores, clients_with_both)
            if number is None:
                self._write_run_file(stage, digests, with_scores)
        for name, folder_client in folders:
            if folder_client not in clients_with_both:
                # This file is that of an earlier export.
                (folder / name / TYPICAL_FILE).unlink(missing_ok=True)
        return folder

    def _clients_with_both(self, client: int | None, prediction: Literal["personal", "both"] | None) -> frozenset[int]:
        """Return the clients that are exported with all that they need to predict with both models.

        Args:
            client: The client that is exported; None for all.
            prediction: See :meth:`export`.

        Raises:
            OptionError: See :meth:`export`.
        """
        exported_prediction = prediction or self.info.get("prediction", "personal")
        # Without two models per client the run's option has no effect, which set-up has reported.
        has_both = self.personalized and self.info["global_model"]
        if exported_prediction != "both" or (prediction is None and not has_both):
            return frozenset()
        clients = self._remaining_clients if client is None else [client]
        # The states of thousands of clients would fill the memory, so they are read again when they are written.
        without_state = [number for number in clients if self.state_of_both(number) is None]
        if without_state and prediction == "both":
            self._required_state_of_both(without_state[0])
        obstacle = self._obstacle_outside_perada()
        if obstacle is not None and prediction == "both":
            raise OptionError(
                f"prediction='both' cannot be exported, because {obstacle}; use Run.save or the format onnx, or choose "
                "prediction='personal'",
                name="prediction",
                value="both",
            )
        without = clients if obstacle is not None else without_state
        if without:
            reason = obstacle or "the run has no statistics of their training images"
            warnings.warn(
                f"the exported folders of {len(without)} of {len(clients)} clients have the personal adapter only, "
                f"because {reason} (docs/prediction.md); prediction='personal' turns this warning off",
                stacklevel=3,
            )
        return frozenset(clients) - frozenset(without)

    def _obstacle_outside_perada(self) -> str | None:
        """Return why a few lines of PyTorch cannot predict with both models of a client, or None."""
        if len(self._global) > 1:
            return f"the global model averages {len(self._global)} models"
        task = self.info["task"]["class_path"]
        if task not in PREDICTIONS_IN_CODE:
            return f"the predictions of the task {task} are not known outside perada"
        return None

    def add_client(self, folder: str | Path, client: int | str, *, scores: bool | None = None) -> Path:
        """Write a client that joined into the folder of its run.

        Apart from the client's own file or folder, only ``run.json`` and the run's ``README.md`` change.

        Args:
            folder: The folder, written by :meth:`save` or :meth:`export`.
            client: Number or name of the client.
            scores: See :meth:`save`.
        """
        folder = _checked_output(folder, UNKNOWN, scores)
        number = self.number(client)
        with_scores = self._with_scores(scores)
        if this_rank():
            return folder
        clients_with_both: frozenset[int] = frozenset()
        if self.state_of_both(number) is not None:
            clients_with_both = self._clients_with_both(number, prediction=None)
        with together(folder) as stage:
            saved = read_run(folder)
            if saved.layout == "states":
                new_rows = write_states(
                    stage, PERSONAL, [number], lambda client: self.state("personal", client), saved.states
                )
                state_of_both = self.state_of_both(number)
                if state_of_both is not None:
                    new_rows |= write_states(stage, TYPICAL, [number], lambda _: state_of_both, saved.states)
                self._write_card(stage, folder, UNKNOWN, with_scores)
                self._write_run_file(stage, saved.files, with_scores, saved.states | new_rows)
            else:
                digests = self._write_adapters(
                    stage,
                    folder,
                    [(f"client_{number}", number)],
                    with_scores=with_scores,
                    clients_with_both=clients_with_both,
                )
                self._write_run_file(stage, saved.files | digests, with_scores)
        return folder

    def _write_states_of_both(self, stage: Path) -> StateIndex:
        """Write what clients need to predict with both models, and return the rows of the files."""
        states_of_both: dict[int, State] = {}
        for client in self._remaining_clients:
            state = self.state_of_both(client)
            if state is not None:
                states_of_both[client] = state
        # A client that joined later may have another number of examples.
        states_of_both = padded_states(states_of_both)
        return write_states(stage, TYPICAL, list(states_of_both), states_of_both.__getitem__)

    def _with_scores(self, requested: bool | None) -> bool:
        """Return whether scores are written: by default only for runs that are not private."""
        return not self.info.get("privacy") if requested is None else requested

    def _adapter_folders(self) -> Iterator[tuple[str, int | None]]:
        """Yield the folders of all adapters by name, with the client, or None for a global adapter."""
        if "adapter_of" in self.info:
            yield "", 0  # a single adapter, as on the Hub
            return
        for name in _global_folders(len(self._global)):
            yield name, None
        if self._personal is not None or len(self._global) == 1:
            for client in self._remaining_clients:
                yield f"client_{client}", client

    def _write_shared_files(self, stage: Path) -> dict[str, str]:
        """Write the adapter's configuration, and the backbone if its weights are not available elsewhere.

        Returns:
            The digests of the files by name.
        """
        base = base_name(self._adapted, self.info["pretrained"])
        config = PeftFolders(self._adapted, base).config
        (stage / CONFIG_FILE).write_text(config, encoding="utf-8")
        names = [CONFIG_FILE]
        if needs_backbone_file(self.info):
            save_backbone(self._adapted, stage)
            names.append(BACKBONE_FILE)
        return {name: digest_of(stage / name) for name in names}

    def _write_card(self, stage: Path, existing: Path, license: str, with_scores: bool) -> None:
        """Write the card of the run.

        Args:
            stage: Folder to write to.
            existing: Folder with a former card, in which users may have written: their text is kept.
            license: See :meth:`save`.
            with_scores: Whether the card has scores.
        """
        _copy_card(existing / CARD_FILE, stage / CARD_FILE)
        cards = Cards(self, base_name(self._adapted, self.info["pretrained"]), with_scores, license)
        cards.write_run(stage / CARD_FILE)

    def _write_adapters(
        self,
        stage: Path,
        existing: Path,
        folders: Iterable[tuple[str, int | None]],
        license: str = UNKNOWN,
        with_scores: bool = True,
        clients_with_both: Collection[int] = (),
    ) -> dict[str, str]:
        """Write adapters with their cards and digests, and the backbone if its weights are not available elsewhere.

        Args:
            stage: Folder to write to.
            existing: Folder with former cards, in which users may have written: their text is kept.
            folders: Names of the adapters' folders, with the client, or None for a global adapter.
            license: See :meth:`save`.
            with_scores: Whether the cards have scores.
            clients_with_both: Clients whose folders get what they need to predict with both models.

        Returns:
            The digests of all tensors' files, by path in the folder.
        """
        adapted = self._adapted
        warn_of_ends(adapted)
        base = base_name(adapted, self.info["pretrained"])
        peft_folders = PeftFolders(adapted, base)
        cards = Cards(self, base, with_scores, license, needs_perada=is_of_perada(adapted.config))
        has_backbone_file = needs_backbone_file(self.info)
        if has_backbone_file:
            save_backbone(adapted, stage)
        # Files are listed in the order of SHA256SUMS.
        file_names = [CARD_FILE]
        if self.info.get("classes"):
            file_names.append(CLASS_NAMES_FILE)
        if adapted.beside:
            file_names.append(BACKBONE_FILE)
        file_names.append(CONFIG_FILE)

        compared_maps: list[ComparedMap] = []
        if clients_with_both:
            # They are the same for all clients.
            some_client = next(iter(clients_with_both))
            state_of_both = self._required_state_of_both(some_client)
            compared_maps = both_predictor(self, some_client, state_of_both, torch.device("cpu")).compared_maps
        digests: dict[str, str] = {}
        # Global adapters come first, in the order of their states.
        for index, (name, client) in enumerate(folders):
            state = self._global[index] if client is None else self.state("personal", client)
            folder = stage / name
            folder.mkdir(exist_ok=True)
            _copy_card(existing / name / CARD_FILE, folder / CARD_FILE)
            backbone_path = None
            if adapted.beside or (has_backbone_file and not name):
                backbone_path = BACKBONE_FILE
            elif has_backbone_file:
                backbone_path = f"../{BACKBONE_FILE}"
            both_files: BothFiles | None = None
            tensor_files = [WEIGHTS_FILE]
            if client is not None and client in clients_with_both:
                state_of_both = self._required_state_of_both(client)
                save_typical(state_of_both, folder / TYPICAL_FILE)
                both_files = BothFiles(state_of_both, compared_maps)
                tensor_files.append(TYPICAL_FILE)
            cards.write(folder / CARD_FILE, client, backbone_path, both_files)
            peft_folders.save(state, folder, self.info.get("classes"), _lora_rank(self.info, client))
            folder_digests = write_sums(folder, [*file_names, *tensor_files])
            for file_name in tensor_files:
                digests[f"{name}/{file_name}".lstrip("/")] = folder_digests[file_name]
        if has_backbone_file:
            digests[BACKBONE_FILE] = digest_of(stage / BACKBONE_FILE)
        return digests

    def _warn_of_test_mode(self, target: object) -> None:
        if is_test_mode(self.info.get("privacy")):
            warnings.warn(f"{str(target)!r}: {TEST_MODE}", stacklevel=3)

    def _write_run_file(
        self, folder: Path, digests: dict[str, str], with_scores: bool, state_index: StateIndex | None = None
    ) -> None:
        """Write ``run.json``.

        Args:
            folder: Folder to write to.
            digests: Digests of the other files.
            with_scores: Whether it has scores.
            state_index: Rows of the files of states; None if the folder has PEFT folders.
        """
        info = self.info
        metrics = self.metrics
        if not with_scores:
            info, metrics = published(info, metrics)
        content = RunFile(
            self.num_clients,
            info,
            metrics,
            global_models=len(self._global),
            shared=self._personal is None or "adapter_of" in self.info,
            files=digests,
            layout="adapters" if state_index is None else "states",
            states=state_index or {},
        )
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
        """Upload the global adapter, or one client's adapter, to a repository of the Hugging Face Hub.

        The repository is a PEFT adapter with a model card, and with a ``run.json`` that reveals nothing of other
        clients. A line on standard error states what is uploaded. The backbone's weights are uploaded, too, if they
        cannot be downloaded elsewhere.

        Args:
            repo: Name of the repository, ``user/name``, which is created if it does not exist.
            client: Number or name of the client. No personal adapter is uploaded unless its client is named.
            private: Whether the repository must be private.
            license: Licence of the adapter in the Hub's notation.
            scores: Whether to upload scores. By default not for a private run: they depend on the clients' images, and
                ε does not cover them.
            token: Token of the Hub; by default that of ``hf auth login``.

        Returns:
            The address of the repository.

        Raises:
            ValueError: If there is no such client, no global model or several; or if the repository must be private,
                exists, and is public.
        """
        check_name("repo", repo)
        check_choice("private", private, [True, False])
        _check_publication(license, scores)
        number = None if client is None else self.number(client)
        if number is None:
            if not self.info["global_model"]:
                raise ValueError(f"{self.info['algorithm']} has no global model to upload; choose a client")
            self.state("global")  # raises an error if there are several
        with_scores = self._with_scores(scores)
        self._warn_of_test_mode(repo)

        def write(folder: Path) -> None:
            self._write_adapters(folder, folder, [("", number)], license, with_scores)
            write_run(folder, shared_run_file(self.info, self.metrics, self.num_clients, number, with_scores))

        adapter = "the global adapter" if number is None else f"the adapter of client {client}"
        contents = "scores, names of classes" if with_scores else "names of classes"
        private_client = number if number in self.own_clients() else None
        description = (
            f"{adapter}: its weights, {contents} and how it was trained; no images. It was trained "
            f"{protection(self.info.get('privacy'), private_client)}."
        )
        return push_folder(write, repo, description, private, token)

    @classmethod
    def from_hub(
        cls, repo: str, *, revision: str | None = None, token: str | None = None, backbone: nn.Module | None = None
    ) -> "Run":
        """Load an adapter that :meth:`push_to_hub` uploaded.

        The global adapter is then every client's, too. A client's adapter is that of client 0, and there is no global
        one.

        Args:
            repo: Name of the repository.
            revision: A branch, tag or commit.
            token: Token of the Hub.
            backbone: See :meth:`load`, which raises the same errors.
        """
        from huggingface_hub import snapshot_download

        return cls.load(snapshot_download(repo, revision=revision, token=token), backbone=backbone)

    @classmethod
    def load(
        cls, folder: str | Path, *, algorithm: Algorithm | None = None, backbone: nn.Module | None = None
    ) -> "Run":
        """Load a run that :meth:`save` or :meth:`export` wrote, the folder of a fit, or one of its checkpoints.

        From the folder of a fit the newest intact checkpoint is loaded. The folder is not changed. Of a run that
        :meth:`save` wrote, a client's state is read and checked when it is first needed, so keep the folder.

        Args:
            folder: The run's folder, such as ``lightning_logs/version_0``, or a checkpoint file.
            algorithm: The algorithm of a fit, if it is not one of perada's.
            backbone: The network, if the run was made with your own.

        Raises:
            FileNotFoundError: If there is no run in ``folder``, or a file of it is missing.
            ValueError: If a file is broken or belongs to another run, or the backbone is missing.
        """
        folder = checked_path("folder", folder)
        check_type("algorithm", algorithm, Algorithm, "PerAda()")
        check_type("backbone", backbone, nn.Module, "the network that the run was made with")
        finish_interrupted_move(folder)
        layout = layout_of(folder)
        if layout == "checkpoints":
            restored_run = restored(folder, algorithm, backbone)
            return cls(
                restored_run.adapted,
                restored_run.global_states,
                restored_run.personal_state,
                restored_run.num_clients,
                restored_run.metrics,
                restored_run.info,
                restored_run.states_of_both.get,
            )
        saved = read_run(folder)
        with naming(folder / RUN_FILE):
            check_record(saved.info.get("privacy") or {}, saved.num_clients)
            Preprocessing.from_record(saved.info["preprocessing"])
        check_files(folder, saved.files)
        if layout == "states":
            return cls._load_states(folder, saved, backbone)
        return cls._load_adapters(folder, saved, backbone)

    @classmethod
    def _load_states(cls, folder: Path, saved: RunFile, backbone: nn.Module | None) -> "Run":
        """Load a run that :meth:`save` wrote."""
        info = saved.info
        adapted = rebuilt(folder, info, backbone, parse_config(folder))
        like = get_state(adapted.model)
        global_files = StateFiles(folder, GLOBAL, saved.states, like)
        personal_files = StateFiles(folder, PERSONAL, saved.states, like)
        fixed = PeftFolders(adapted).fixed
        fixed_files = StateFiles(folder, FIXED, saved.states, fixed)
        absent = {*info.get("forgotten", ()), *info.get("elsewhere", ())}
        clients_with_rows = set(personal_files.numbers)
        shared = saved.shared
        global_files.require(range(saved.global_models))
        global_states = [global_files(index) for index in range(saved.global_models)]
        if not shared:
            own_clients = info.get("own_adapters", range(saved.num_clients))
            personal_files.require(client for client in own_clients if client not in absent)
        if fixed:
            fixed_files.require([0])
            for name, value in fixed_files(0).items():
                fixed[name].copy_(value)
        if "adapter_of" in info:
            return cls(adapted, global_states, lambda _: global_states[0], saved.num_clients, saved.metrics, info)
        if shared:
            return cls(adapted, global_states, None, saved.num_clients, saved.metrics, info)

        def personal_state(client: int) -> State:
            if client in clients_with_rows:
                return personal_files(client)
            # Clients that share the global adapter beside some that joined.
            return global_states[0]

        typical_files = StateFiles(folder, TYPICAL, saved.states)

        def state_of_both(client: int) -> State | None:
            return typical_files(client) if client in typical_files.numbers else None

        return cls(adapted, global_states, personal_state, saved.num_clients, saved.metrics, info, state_of_both)

    @classmethod
    def _load_adapters(cls, folder: Path, saved: RunFile, backbone: nn.Module | None) -> "Run":
        """Load a run that :meth:`export` wrote, or an adapter from the Hub."""
        info = saved.info
        # A single adapter, as on the Hub, is in the folder itself.
        is_single = saved.global_models == 1 and not (folder / "global").is_dir() and (folder / CONFIG_FILE).is_file()
        first_folder = folder if is_single else folder / next(_global_folders(saved.global_models))
        config = read_config(first_folder)
        adapted = rebuilt(folder, info, backbone, config)
        peft_folders = PeftFolders(adapted)
        if is_single:
            global_states = [peft_folders.load(folder, config)]
        else:
            names = _global_folders(saved.global_models)
            global_states = [peft_folders.load(folder / name, config) for name in names]
        if "adapter_of" in info:
            return cls(adapted, global_states, lambda _: global_states[0], saved.num_clients, saved.metrics, info)
        if saved.shared:
            return cls(adapted, global_states, None, saved.num_clients, saved.metrics, info)
        absent = {*info.get("forgotten", ()), *info.get("elsewhere", ())}
        personal_states = {}
        for client in range(saved.num_clients):
            if client not in absent:
                rank = _lora_rank(info, client)
                personal_states[client] = peft_folders.load(folder / f"client_{client}", config, rank)

        def state_of_both(client: int) -> State | None:
            path = f"client_{client}/{TYPICAL_FILE}"
            return load_typical(folder / path) if path in saved.files else None

        return cls(
            adapted, global_states, personal_states.__getitem__, saved.num_clients, saved.metrics, info, state_of_both
        )


def _check_publication(license: object, scores: object) -> None:
    """Raise an OptionError for an option that has a wrong type: the word "no" for ``scores`` would publish them."""
    check_name("license", license)
    check_choice("scores", scores, [True, False, None])


def _checked_output(folder: object, license: object, scores: object) -> Path:
    """Return the folder to write to, after checking it and the options of what is written.

    Raises:
        OptionError: If an option has a wrong type.
        OSError: If the folder cannot be created or written to.
    """
    _check_publication(license, scores)
    path = checked_path("folder", folder)
    check_output_folder("folder", path)
    return path


def _check_layout(folder: Path, layout: Layout) -> None:
    """Check what is in a folder to write.

    Raises:
        FileExistsError: If it has a file that would be replaced, and that perada did not write.
        ValueError: If it has a run in the other layout, some of whose files would remain.
    """
    check_saved_run(folder)
    try:
        former_layout = layout_of(folder)
    except ValueError:
        # A broken run may be replaced.
        return
    if former_layout not in ("checkpoints", layout):
        writer = "Run.save" if former_layout == "states" else "Run.export"
        raise ValueError(
            f"{str(folder)!r} contains a run that {writer} wrote, in other files than these; choose a different "
            "folder, or delete it"
        )


def _copy_card(former_card: Path, card: Path) -> None:
    """Copy a former card, in which users may have written."""
    # A link could lead to a file that is not meant to be shared.
    is_link = former_card.is_symlink() or former_card.parent.is_symlink()
    if former_card.is_file() and not is_link:
        shutil.copyfile(former_card, card)


def _global_folders(num_models: int) -> Iterator[str]:
    """Yield the names of the global adapters' folders.

    One by one: a broken file may name millions, of which the first is missing.
    """
    if num_models == 1:
        yield "global"
        return
    for index in range(num_models):
        yield f"global_{index}"


def _lora_rank(info: Mapping[str, Any], client: int | None) -> int | None:
    """Return the LoRA rank of a client; None for the adapter's rank, which clients that joined have."""
    ranks = info.get("lora_ranks", [])
    if client is None or client >= len(ranks):
        return None
    rank: int = ranks[client]
    return rank
