# SPDX-License-Identifier: Apache-2.0
"""What comes out of a run: models, states and metrics, saved and loaded."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from perada.backbones import AdaptedModel, build_backbone
from perada.export import load_adapter, load_backbone, read_config, save_adapter, save_backbone, write_json
from perada.states import State, clone, set_state

RUN_FILE = "run.json"
FORMAT = 1


class Run:
    """The adapters of all clients and of the server, on one frozen backbone.

    Attributes:
        num_clients: M.
        metrics: ``{"rounds": [{"round": 0, name: value, ...}, ...], "clients": {name: [value of each client]}}``; the
            clients' values are those of the last evaluation.
        info: What the run was: backbone, weights, number of classes, image size, algorithm, seed.
    """

    def __init__(
        self,
        adapted: AdaptedModel,
        global_state: State,
        personal_state: Callable[[int], State],
        num_clients: int,
        metrics: dict[str, Any],
        info: dict[str, Any],
    ) -> None:
        self._adapted, self._global, self._personal = adapted, global_state, personal_state
        self.num_clients, self.metrics, self.info = num_clients, metrics, info

    def state(self, role: str, client: int | None = None) -> State:
        """A copy of one state.

        Args:
            role: ``"global"`` or ``"personal"``; where clients have no state of their own, their personal state is the
                global one.
            client: Index of the client, for ``"personal"``.

        Returns:
            ``{name in the single model: tensor}``.

        Raises:
            ValueError: If the role is unknown, or the client is missing or does not exist.
        """
        if role == "global":
            return clone(self._global)
        if role != "personal":
            raise ValueError(f"role={role!r} is not kept after a run; ask for 'global' or 'personal'")
        if client is None or not 0 <= client < self.num_clients:
            raise ValueError(f"client={client} does not exist; give a number from 0 to {self.num_clients - 1}")
        return clone(self._personal(client))

    def personal(self, client: int) -> nn.Module:
        """Client ``client``'s model: a network of its own, in evaluation mode, that maps images to logits."""
        return self._model(self.state("personal", client))

    def global_model(self) -> nn.Module:
        """The server's model: a network of its own, in evaluation mode, that maps images to logits."""
        return self._model(self.state("global"))

    def _model(self, state: State) -> nn.Module:
        model = copy.deepcopy(self._adapted.model)
        set_state(model, state)
        return model.eval()

    def save(self, folder: str | Path) -> Path:
        """Write one PEFT folder per client (``client_0`` …) and ``global``, with what it takes to load them.

        The frozen backbone is written only where its weights cannot be had elsewhere (random, or a network of
        your own).

        Returns:
            The folder.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_adapter(self._adapted, self._global, folder / "global")
        for client in range(self.num_clients):
            save_adapter(self._adapted, self._personal(client), folder / f"client_{client}")
        if not self.info["pretrained"] or self.info["backbone"] is None:
            save_backbone(self._adapted, folder)
        content = {"format": FORMAT, "num_clients": self.num_clients, "info": self.info, "metrics": self.metrics}
        write_json(folder / RUN_FILE, content)
        return folder

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
        if not (folder / RUN_FILE).is_file():
            raise FileNotFoundError(
                f"{str(folder)!r} holds no run: it has no {RUN_FILE}; give a folder that Run.save wrote"
            )
        try:
            saved = json.loads((folder / RUN_FILE).read_text())
            info, clients = saved["info"], saved["num_clients"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{str(folder / RUN_FILE)!r} is broken ({type(error).__name__}: {error}); save it anew"
            ) from error
        if info["backbone"] is None and backbone is None:
            raise ValueError(
                f"the run in {str(folder)!r} was made with a network of your own; pass one of the same class as "
                "backbone="
            )
        pretrained = False if (folder / "backbone.safetensors").is_file() else info["pretrained"]
        built = build_backbone(
            backbone if backbone is not None else info["backbone"],
            info["num_classes"],
            pretrained=pretrained,
            image_size=info["image_size"],
        )
        adapted = load_backbone(built, read_config(folder / "global"), folder)
        states = [load_adapter(adapted, folder / f"client_{client}") for client in range(clients)]
        return cls(
            adapted, load_adapter(adapted, folder / "global"), states.__getitem__, clients, saved["metrics"], info
        )
