# SPDX-License-Identifier: Apache-2.0
"""The models of a run: states, networks and their predictions."""

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from perada.core.checks import OptionError, check_choice, check_integer, check_type, installed, without_effect
from perada.core.seeding import generator
from perada.core.states import State, clone, parameter_keys, set_state, to_device
from perada.data.medical.reading import known_kinds
from perada.data.preprocessing import Preprocessing
from perada.engine.fold_check import perturbed_states
from perada.federation.options import Prediction
from perada.models.adapted import AdaptedModel
from perada.models.backbones import IMAGE
from perada.models.merging import check_merged, merge_adapter
from perada.results.client_names import available_client
from perada.results.inference import PlacedImage, Predictions, as_list, check_device, check_outputs, read_batch
from perada.results.predictors import BatchOutputs, BothModelsPredictor, NetworkPredictor, Predictor, in_dtype_of
from perada.tasks import Task
from perada.tasks.base import Average, make_task

if TYPE_CHECKING:
    from pandas import DataFrame


class Ensemble(nn.Module):
    """Averages the ``logits`` or ``probabilities`` of several networks. The output are logits either way."""

    def __init__(self, members: Sequence[nn.Module], average: Average, task: Task) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.average = average
        self.task = task

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, ...) to logits (B, K), or (B, K, H, W) of pixels."""
        outputs = torch.stack([member(x) for member in self.members])
        if not self.task.per_pixel:
            return self.task.ensemble(outputs, self.average)
        # (M, B, K, H, W): tasks have the classes last, and networks do not.
        return self.task.ensemble(outputs.movedim(2, -1), self.average).movedim(-1, 1)


@dataclass(frozen=True)
class ChosenPrediction:
    """Which models predict for a client.

    Attributes:
        prediction: ``personal``, ``global`` or ``both``.
        state_of_both: What the client needs to predict with both models; None for a single model.
    """

    prediction: Prediction
    state_of_both: State | None = None


class Models:
    """The adapters of all clients and of the server, on one frozen backbone.

    Attributes:
        num_clients: Number of clients M.
        metrics: ``{"rounds": [{"round": 0, name: value, ...}, ...], "clients": {name: [value of each client]}}``. The
            clients' values are those of the last evaluation. Optional entries: ``shifts``, the scores on corruptions,
            ``{shift: {kind: {"severity": [...], "personal": [...], "personal_std": [...], "global": [...]}}}``;
            ``initial``, the clients' scores before the first round, by name; ``by_round``, ``{"round": 0,
            "personal/local_test": [...]}`` for each evaluation; ``global/local_test``, the global model's score on each
            client's test images; ``partition``, numbers of images (M, K) of each client and class by ``train`` and
            ``test``; ``predictions``, the records of :meth:`.Tally.record` by ``personal`` and
            ``global``.
        info: Facts about the run: backbone, weights, number of classes, image size (to which images were resized, or
            ``None``), algorithm, seed (``None`` if the noise of a private run was derived from it); ``preprocessing``,
            the record of a :class:`perada.data.preprocessing.Preprocessing`; ``privacy`` of a private run, see
            :mod:`perada.results.cards`; the names of ``classes`` and of ``clients``, lists or ``None``. For a single
            client's adapter from the Hub, ``adapter_of`` is the client's name; it is client 0 here, and there is no
            global adapter. For the server of a deployment, ``elsewhere`` are the numbers of the clients whose personal
            adapters are at their sites.
    """

    def __init__(
        self,
        adapted: AdaptedModel,
        global_states: Sequence[State],
        personal_state: Callable[[int], State] | None,
        num_clients: int,
        metrics: dict[str, Any],
        info: dict[str, Any],
        state_of_both: Callable[[int], State | None] | None = None,
    ) -> None:
        self._adapted = adapted
        self._global = list(global_states)
        self._personal = personal_state
        # Returns what a client needs to predict with both models, or None.
        self._state_of_both = state_of_both
        self.num_clients = num_clients
        self.metrics = metrics
        self.info = info

    def __repr__(self) -> str:
        """Return a one-line summary."""
        algorithm = self.info.get("algorithm", "unknown")
        num_rounds = len(self.metrics["rounds"])
        return f"<{type(self).__name__}: {algorithm}, {self.num_clients} clients, {num_rounds} rounds>"

    def _required_state_of_both(self, client: int | str) -> State:
        """Return what a client needs to predict with both models (:meth:`.BothModels.state`).

        Raises:
            OptionError: If the run does not have it.
        """
        state_of_both = self.state_of_both(self.number(client))
        if state_of_both is None:
            raise OptionError(
                f"prediction='both': the run has no statistics of the training images of client {client!r}, which "
                "images are compared with; train with evaluation.prediction=both, or choose prediction='personal'",
                name="prediction",
                value="both",
            )
        return state_of_both

    def state(self, role: str, client: int | str | None = None) -> State:
        """Return a copy of one state on the CPU, ``{name in the single model: tensor}``.

        Use :meth:`states` for the states of an ensemble.

        Args:
            role: ``"global"`` or ``"personal"``. If clients have no personal states, these are the global one.
            client: Index or name of the client, for ``"personal"`` only.

        Raises:
            ValueError: If the role is unknown, the client is missing or does not exist, or there are several states.
        """
        if role not in ("global", "personal"):
            raise ValueError(f"role={role!r} is not kept after a run; use 'global' or 'personal'")
        if role == "global" and client is not None:
            raise without_effect("client", client, "role='global'", "choose role='personal'")
        if role == "personal":
            client = self.number(client)
            if self._personal is not None:
                return _copy_to_cpu(self._personal(client))
        self._check_global()
        if len(self._global) > 1:
            raise ValueError(f"the global model averages {len(self._global)} states; use states('global')")
        return _copy_to_cpu(self._global[0])

    def states(self, role: str) -> list[State]:
        """Return copies of all states of a role: those of an ensemble, or of all clients that the run still has."""
        if role == "global":
            self._check_global()
            return [_copy_to_cpu(state) for state in self._global]
        if role == "personal" and self._personal is not None:
            return [_copy_to_cpu(self._personal(client)) for client in self._remaining_clients]
        return [self.state(role, client) for client in self._remaining_clients]

    def _check_global(self) -> None:
        if "adapter_of" in self.info:
            raise ValueError(
                f"there is no global adapter, only that of client {self.info['adapter_of']!r}; pass client=0"
            )

    def own_clients(self) -> frozenset[int]:
        """Return the clients whose adapters are not copies of the global one."""
        if self._personal is None:
            return frozenset()
        return frozenset(self.info.get("own_adapters", range(self.num_clients)))

    def number(self, client: int | str | None) -> int:
        """Return the number of a client, given its number or name.

        Raises:
            ValueError: If there is no such client, it was forgotten, or its adapter is at its site.
        """
        return available_client(client, self.info, self.num_clients)

    @property
    def _remaining_clients(self) -> list[int]:
        """Numbers of the clients whose adapters are in the run, neither forgotten nor kept at their sites."""
        absent = {*self.info.get("forgotten", ()), *self.info.get("elsewhere", ())}
        return [client for client in range(self.num_clients) if client not in absent]

    def personal(self, client: int | str) -> nn.Module:
        """Return a client's model, by number or name: a new network in evaluation mode that maps images to logits.

        If clients predict with an ensemble of global models, this is the ensemble.
        """
        if self._personal is None and len(self._global) > 1:
            return self.global_model()
        return self._make_model(self.state("personal", client))

    def global_model(self) -> nn.Module:
        """Return the server's model: a new network in evaluation mode that maps images to logits.

        Raises:
            ValueError: If the algorithm has none, since clients keep a part of the model or all of it.
        """
        if not self.info["global_model"]:
            raise ValueError(
                f"{self.info['algorithm']} has no global model: only the shared part of the server's model is trained; "
                "use personal(client)"
            )
        members = [self._make_model(state) for state in self.states("global")]
        if len(members) == 1:
            return members[0]
        return Ensemble(members, self.info["average"], make_task(self.info["task"])).eval()

    def history(self) -> "DataFrame":
        """Return the rounds as a pandas frame, indexed by ``round`` from 0, with one column per metric.

        A metric that a round lacks, such as a score if nothing was evaluated, is NaN.

        Raises:
            ModuleNotFoundError: If pandas is not installed.
        """
        pandas = installed("pandas", "Run.history", "report")
        rounds = self.metrics["rounds"]
        columns = None if rounds else ["round"]
        frame: DataFrame = pandas.DataFrame(rounds, columns=columns).set_index("round")
        return frame

    @property
    def preprocessing(self) -> Preprocessing:
        """Preprocessing of images for the models, as in training."""
        return Preprocessing.from_record(self.info["preprocessing"])

    def predict(
        self,
        images: Any,  # noqa: ANN401  # one image of any kind, or several
        client: int | str | None = None,
        *,
        prediction: Prediction | None = None,
        batch_size: int = 64,
        device: torch.device | str = "cpu",
        progress: bool = False,
        broken: dict[Any, str] | None = None,
    ) -> Predictions:
        """Predict with a client's model or the global one.

        Args:
            images: A path, a PIL image, an array (H, W) or (H, W, channels), or a tensor (channels, H, W); a list of
                these; or a batch with four axes. uint8 images are resized and normalised as in training
                (:class:`perada.data.preprocessing.Preprocessing`). Floating-point images are assumed to be prepared for
                the model, as in training.
            client: The client's number or name; None for the global model.
            prediction: Models with which the client predicts: ``personal``, ``global``, or ``both``
                (docs/prediction.md); by default those of the option ``evaluation.prediction`` of the run.
            batch_size: Images in memory at a time, and in a forward pass.
            device: Device of the model.
            progress: Whether to show a progress bar.
            broken: Receives an error for each image that cannot be read, or for which outputs of the model are NaN or
                infinite, by its path or else its place in ``images``; these images are skipped. By default the first
                error is raised.

        Raises:
            FileNotFoundError: If a file does not exist.
            ValueError: If a file or an image is invalid, the client does not exist, there is no global model, or the
                outputs are NaN or infinite (a :class:`.FailedOutputsError`).
            TypeError: If something is not an image.
        """
        check_integer("batch_size", batch_size)
        check_choice("progress", progress, [True, False])
        check_choice("prediction", prediction, [None, *get_args(Prediction)])
        check_type("broken", broken, dict, "{}")
        preprocessing = preprocessing_for(self, client)
        task = make_task(self.info["task"])
        # A caller may be in inference mode, in which networks can be neither changed nor searched for frozen layers.
        with torch.inference_mode(False):
            predictor = make_predictor(self, client, prediction, check_device(device))
        all_images = [PlacedImage(place, image) for place, image in enumerate(as_list(images))]
        if not all_images:
            raise ValueError("there are no images; pass at least one")
        if client is None and preprocessing.medical.window is None:
            _reject_medical(all_images, preprocessing)
        outputs_of_batches: list[BatchOutputs] = []
        readable_images = []
        with torch.inference_mode(), tqdm(total=len(all_images), disable=not progress, unit=" images") as bar:
            for start in range(0, len(all_images), batch_size):
                batch_images = all_images[start : start + batch_size]
                bar.update(len(batch_images))
                batch, batch_images = read_batch(preprocessing, batch_images, broken)
                if batch is not None:
                    outputs_of_batches.append(predictor(batch))
                readable_images += batch_images
        if not readable_images:
            raise ValueError(f"none of the {len(all_images)} images can be read: {'; '.join((broken or {}).values())}")
        model_name = "the global model" if client is None else f"the model of client {client!r}"
        all_logits = torch.cat([outputs.logits for outputs in outputs_of_batches])
        is_finite = check_outputs(all_logits, readable_images, broken, model_name)
        predicted_images = [
            placed.image for placed, finite in zip(readable_images, is_finite.tolist(), strict=True) if finite
        ]
        # Autograd rejects tensors of inference mode; a copy made outside of it is an ordinary tensor.
        logits = all_logits[is_finite].clone()
        masks = [outputs.typical for outputs in outputs_of_batches if outputs.typical is not None]
        typical = torch.cat(masks)[is_finite].clone() if masks else None
        probabilities = task.predictions(logits)
        labels = task.predicted(logits)
        # Masks of images of several sizes could not be stacked; Predictions.save_masks resizes them.
        if task.has_positions and not task.per_pixel:
            own_sizes = [preprocessing.own_size(image) for image in predicted_images]
            _, height, width = preprocessing.shape
            probabilities = task.in_own_pixels(probabilities, (height, width), own_sizes)
            labels = task.in_own_pixels(labels, (height, width), own_sizes)
        paths = None
        if all(isinstance(image, str | Path) for image in predicted_images):
            paths = tuple(str(image) for image in predicted_images)
        classes = self.info.get("classes") or [str(number) for number in range(self.info["num_classes"])]
        axis = preprocessing.medical.axis
        return Predictions(probabilities, labels, tuple(classes), paths, typical=typical, axis=axis)

    @property
    def personalized(self) -> bool:
        """Whether clients have personal states."""
        return self._personal is not None

    @property
    def predicts_with_both(self) -> bool:
        """Whether some client has what it needs to predict with both models (docs/prediction.md).

        :meth:`perada.Run.save` and :meth:`perada.Run.export` write it.
        """
        return any(self.state_of_both(client) is not None for client in self._remaining_clients)

    def state_of_both(self, client: int) -> State | None:
        """Return what a client needs to predict with both models (:meth:`.BothModels.state`); None if it is missing."""
        return None if self._state_of_both is None else self._state_of_both(client)

    def merged(self, client: int | None) -> nn.Module:
        """Return a client's model, or the global one (None), with the adapter merged into the backbone's weights.

        PEFT merges the adapter. Shared weights are not changed in layers without an adapter. The result is compared
        with the model of :meth:`personal`.

        Raises:
            NotImplementedError: If PEFT cannot merge the adapter, or the merged model computes something else.
        """
        state = self.state("global") if client is None else self.state("personal", client)
        peft_model = self._adapted.peft_model
        images = in_dtype_of(self._adapted.model, _noise_samples(self.preprocessing))
        # An adapter that training has hardly changed hides a wrong merge, whose error grows with it: a perturbed state
        # is compared first.
        moved_state = perturbed_states(state, parameter_keys(self._adapted.model), num_clients=1, least=0.02)[0]
        moved = merge_adapter(copy.deepcopy(peft_model), moved_state)
        check_merged(peft_model, moved, self._make_model(moved_state), images)
        merged = merge_adapter(copy.deepcopy(peft_model).to(memory_format=torch.contiguous_format), state)
        check_merged(peft_model, merged, self._make_model(state), images)
        return merged

    def adapted(self) -> AdaptedModel:
        """Return a copy of the backbone with its adapter, in the global state.

        Raises:
            ValueError: If there are several global states.
        """
        adapted = copy.deepcopy(self._adapted)
        set_state(adapted.model, self.state("global"))
        return adapted

    def _make_model(self, state: State) -> nn.Module:
        model = copy.deepcopy(self._adapted.model).to(memory_format=torch.contiguous_format)
        set_state(model, state)
        setattr(model, IMAGE, self._adapted.backbone.image_config)
        return model.eval()


def preprocessing_for(run: Models, client: int | str | None) -> Preprocessing:
    """Return the preprocessing of the images of a run's client, by number or name; None for the global model."""
    if client is None:
        return run.preprocessing
    number = run.number(client)
    names = run.info.get("clients")
    return run.preprocessing.of_client(names[number] if names else str(number))


def _reject_medical(placed_images: Sequence[PlacedImage], preprocessing: Preprocessing) -> None:
    """Raise an OptionError if some images are medical files, which have a window only as those of a client."""
    for placed in placed_images:
        if isinstance(placed.image, str | Path) and known_kinds([str(placed.image)]) != [None]:
            preprocessing.medical.of_client(None)


def chosen_prediction(run: Models, client: int | str | None, prediction: Prediction | None) -> ChosenPrediction:
    """Return which models of a run predict for a client, or that the global one does (None).

    Warns if the run's option asks for both models, and the client lacks what that needs.

    Args:
        run: The run.
        client: Number or name of the client.
        prediction: The models; None for those of the run's option.

    Raises:
        OptionError: If there is no client, and another model than the global one is asked for; or the client lacks what
            it needs to predict with both models.
    """
    if client is None:
        if prediction not in (None, "global"):
            raise without_effect("prediction", prediction, "client=None, the global model", "name a client")
        return ChosenPrediction("global")
    state_of_both = run.state_of_both(run.number(client))
    if prediction is None:
        prediction = run.info.get("prediction", "personal")
        if prediction == "both" and state_of_both is None:
            if run.info["global_model"] and run.number(client) in run.own_clients():
                # Such as an adapter from the Hub.
                warnings.warn(
                    f"client {client!r} predicts with its personal model only, since the run has no statistics of its "
                    "training images (docs/prediction.md); prediction='personal' turns this warning off",
                    stacklevel=4,
                )
            prediction = "personal"
    if prediction != "both":
        return ChosenPrediction(prediction)
    return ChosenPrediction("both", run._required_state_of_both(client))


def make_predictor(
    run: Models, client: int | str | None, prediction: Prediction | None, device: torch.device
) -> Predictor:
    """Return what predicts images with models of a run: those of a client, or the global model (None).

    Args:
        run: The run.
        client: Number or name of the client.
        prediction: Models with which it predicts, as in :meth:`Models.predict`.
        device: Device of the passes.

    Raises:
        OptionError: If there is no client, and another model than the global one is asked for; or the client lacks what
            it needs to predict with both models.
    """
    chosen = chosen_prediction(run, client, prediction)
    if chosen.state_of_both is not None:
        return both_predictor(run, run.number(client), chosen.state_of_both, device)
    if client is None or chosen.prediction == "global":
        network = run.global_model()
    else:
        network = run.personal(client)
    return NetworkPredictor(network, make_task(run.info["task"]), device)


def both_predictor(run: Models, client: int, state_of_both: State, device: torch.device) -> BothModelsPredictor:
    """Return the prediction with both models of a client of a run.

    Args:
        run: The run.
        client: Number of the client.
        state_of_both: The client's :meth:`.BothModels.state`.
        device: Device of the passes.
    """
    return BothModelsPredictor(
        run._adapted.model,
        run.state("personal", client),
        run.states("global"),
        state_of_both,
        make_task(run.info["task"]),
        run.info["average"],
        _noise_samples(run.preprocessing)[0],
        device,
    )


def _noise_samples(preprocessing: Preprocessing) -> Tensor:
    """Return two samples (2, ...) in the shape of the models' inputs: noise, or texts of the first token."""
    if preprocessing.kind == "tokens":
        return torch.zeros(2, *preprocessing.shape, dtype=torch.int64)
    return torch.randn(2, *preprocessing.shape, generator=generator(0, "merging"))


def _copy_to_cpu(state: State) -> State:
    """Copy a state to the CPU."""
    on_cpu = clone(to_device(state, torch.device("cpu")))
    return {key: value.contiguous() for key, value in on_cpu.items()}
