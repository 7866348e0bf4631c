# SPDX-License-Identifier: Apache-2.0
"""The models that come out of a run: states, networks and their predictions."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from perada.algorithms.base import Average
from perada.core.checks import check_integer, installed
from perada.core.seeding import generator
from perada.core.states import State, clone, parameter_keys, set_state, to_device
from perada.data.preprocessing import Preprocessing
from perada.engine.engine import ensemble
from perada.engine.fold import fold
from perada.engine.fold_check import perturbed_states
from perada.models.adapted import AdaptedModel
from perada.models.backbones import IMAGE
from perada.models.merging import check_merged, merge_adapter
from perada.results.inference import Predictions, as_list, client_index, readable, usable

if TYPE_CHECKING:
    from pandas import DataFrame


class Ensemble(nn.Module):
    """Several networks whose ``logits`` or ``probabilities`` are averaged; the outcome are logits either way."""

    def __init__(self, members: Sequence[nn.Module], average: Average, multilabel: bool) -> None:
        super().__init__()
        self.members, self.average, self.multilabel = nn.ModuleList(members), average, multilabel

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, ...) to logits (B, K)."""
        return ensemble(torch.stack([member(x) for member in self.members]), self.average, self.multilabel)


class Models:
    """The adapters of all clients and of the server, on one frozen backbone.

    Attributes:
        num_clients: M.
        metrics: ``{"rounds": [{"round": 0, name: value, ...}, ...], "clients": {name: [value of each client]}}``; the
            clients' values are those of the last evaluation. Where corruptions were scored, ``shifts`` holds ``{shift:
            {kind: {"severity": [...], "personal": [...], "personal_std": [...], "global": [...]}}}``. Where known:
            ``initial``, the clients' scores before the first round, by name; ``by_round``, ``{"round": 0,
            "personal/local_test": [...]}`` for each evaluation; ``global/local_test``, the global model's score on each
            client's test images; ``partition``, images (M, K) of each client and class by ``train`` and ``test``;
            ``predictions``, by ``personal`` and ``global`` what :meth:`perada.federation.scores.Tally.record` gives.
        info: What the run was: backbone, weights, number of classes, image size (what images were resized to, or
            ``None``), algorithm, seed (``None`` where the noise of a private run follows from it); ``preprocessing``,
            what was done to images (:class:`perada.data.preprocessing.Preprocessing`); ``privacy`` if it was private,
            as :mod:`perada.results.cards` describes it; the names of ``classes`` and of ``clients``, lists, or
            ``None`` where there are none. Of one client's adapter alone, from the Hub, ``adapter_of`` says whose it is;
            it is client 0's here, and there is no global one. Of a deployment's server, ``elsewhere`` are the numbers
            of the clients whose personal adapters are at their sites.
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

    def __repr__(self) -> str:
        """What it is, in a line; :attr:`metrics` and :attr:`info` say the rest."""
        what, rounds = self.info.get("algorithm", "unknown"), len(self.metrics["rounds"])
        return f"<{type(self).__name__}: {what}, {self.num_clients} clients, {rounds} rounds>"

    def state(self, role: str, client: int | str | None = None) -> State:
        """A copy ``{name in the single model: tensor}`` of one state, on the CPU, as Lightning leaves a trained model.

        :meth:`states` gives all of an ensemble.

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
                return _copied(self._personal(client))
        self._check_global()
        if len(self._global) > 1:
            raise ValueError(f"the global model averages {len(self._global)} states; ask for states('global')")
        return _copied(self._global[0])

    def states(self, role: str) -> list[State]:
        """Copies of all states of a role, as :meth:`state` gives them: of an ensemble, or of all clients left."""
        if role == "global":
            self._check_global()
            return [_copied(state) for state in self._global]
        return [self.state(role, client) for client in self._remaining]

    def _check_global(self) -> None:
        if "adapter_of" in self.info:
            raise ValueError(
                f"there is no global adapter: this is that of client {self.info['adapter_of']!r} alone; give client=0"
            )

    def own_clients(self) -> frozenset[int]:
        """The clients whose adapters are their own, and no copies of the global one."""
        return frozenset(self.info.get("own_adapters", range(self.num_clients)) if self._personal is not None else ())

    def number(self, client: int | str | None) -> int:
        """The number of a client, given as such or by name.

        Raises:
            ValueError: If there is no such client, or it was forgotten, or its adapter is at its site.
        """
        number = client_index(client, self.info.get("clients"), self.num_clients)
        if number in self.info.get("forgotten", ()):
            raise ValueError(f"client={client!r} was forgotten: the run has no adapter of it; name another client")
        if number in self.info.get("elsewhere", ()):
            raise ValueError(
                f"client={client!r} keeps its adapter at its site: the server has none of it; export it there "
                "(perada deploy export site.yaml), or ask for the global model"
            )
        return number

    @property
    def _remaining(self) -> list[int]:
        """The numbers of the clients whose adapters are here: not forgotten, and not kept at their sites."""
        absent = {*self.info.get("forgotten", ()), *self.info.get("elsewhere", ())}
        return [client for client in range(self.num_clients) if client not in absent]

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
        if not self.info["global_model"]:
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
        rounds, pandas = self.metrics["rounds"], installed("pandas", "Run.history", "report")
        frame: DataFrame = pandas.DataFrame(rounds, columns=None if rounds else ["round"]).set_index("round")
        return frame

    @property
    def preprocessing(self) -> Preprocessing:
        """What makes images ready for the models, as training did."""
        return Preprocessing.from_record(self.info["preprocessing"])

    def predict(
        self,
        images: Any,  # noqa: ANN401  # one image of any kind, or several
        client: int | str | None = None,
        *,
        batch_size: int = 64,
        device: torch.device | str = "cpu",
        progress: bool = False,
        broken: dict[Any, str] | None = None,
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
            broken: Takes the paths that cannot be read, and why; they are left out. By default the first is an error.

        Raises:
            FileNotFoundError: If a file does not exist.
            ValueError: If a file or an image cannot be used, the client does not exist, or there is no global model.
            TypeError: If something is not an image.
        """
        check_integer("batch_size", batch_size)
        preprocessing, multilabel = self.preprocessing, self.info["multilabel"]
        model = self.global_model() if client is None else self.personal(client)
        given = as_list(images)
        if not given:
            raise ValueError("there are no images; give one at least")
        model = fold(model.to(usable(device)), random_only=True).model.eval()  # whose frozen layers are faster
        rows, known = [], []
        with torch.inference_mode(), tqdm(total=len(given), disable=not progress, unit=" images") as bar:
            for start in range(0, len(given), batch_size):
                named = given[start : start + batch_size]
                bar.update(len(named))
                batch, named = readable(preprocessing, named, broken)
                if batch is not None:
                    logits = model(batch.to(device)).float().cpu()
                    rows.append(logits.sigmoid() if multilabel else logits.softmax(-1))
                known += named
        if not known:
            raise ValueError(f"none of the {len(given)} images can be read: {'; '.join((broken or {}).values())}")
        probabilities = torch.cat(rows).clone()  # no inference tensor
        labels = (probabilities > 0.5).long() if multilabel else probabilities.argmax(-1)
        paths = tuple(map(str, known)) if all(isinstance(one, str | Path) for one in known) else None
        classes = self.info.get("classes") or list(map(str, range(self.info["num_classes"])))
        return Predictions(probabilities, labels, tuple(classes), paths)

    @property
    def personalized(self) -> bool:
        """Whether clients have states of their own."""
        return self._personal is not None

    def merged(self, client: int | None) -> nn.Module:
        """A client's model, or the global one (None), with the adapter merged into the backbone's weights by PEFT.

        Weights that the network uses in several places stay as they are where no adapter stands. The model is compared
        with the one that :meth:`personal` gives.

        Raises:
            NotImplementedError: If PEFT cannot merge the adapter, or what it merges computes something else.
        """
        state = self.state("global") if client is None else self.state("personal", client)
        peft_model = self._adapted.peft_model
        images = _noise(self.preprocessing)
        # An adapter that training has hardly moved hides a wrong merge, which grows with it.
        moved_state = perturbed_states(state, parameter_keys(self._adapted.model), clients=1, least=0.02)[0]
        moved = merge_adapter(copy.deepcopy(peft_model), moved_state)
        check_merged(peft_model, moved, self._model(moved_state), images)
        merged = merge_adapter(copy.deepcopy(peft_model).to(memory_format=torch.contiguous_format), state)
        check_merged(peft_model, merged, self._model(state), images)
        return merged

    def adapted(self) -> AdaptedModel:
        """A copy of the backbone with its adapter, in the global state.

        Raises:
            ValueError: If there are several global states.
        """
        copied = copy.deepcopy(self._adapted)
        set_state(copied.model, self.state("global"))
        return copied

    def _model(self, state: State) -> nn.Module:
        model = copy.deepcopy(self._adapted.model).to(memory_format=torch.contiguous_format)
        set_state(model, state)
        setattr(model, IMAGE, self._adapted.backbone.image)
        return model.eval()


def _noise(preprocessing: Preprocessing) -> Tensor:
    """Two samples (2, ...) of the shape that the models take: noise, or texts of the first token."""
    if preprocessing.kind == "tokens":
        return torch.zeros(2, *preprocessing.shape, dtype=torch.int64)
    return torch.randn(2, *preprocessing.shape, generator=generator(0, "merging"))


def _copied(state: State) -> State:
    return {key: value.contiguous() for key, value in clone(to_device(state, torch.device("cpu"))).items()}
