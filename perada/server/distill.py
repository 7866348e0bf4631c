# SPDX-License-Identifier: Apache-2.0
"""Ensemble distillation of the clients' models into the global one on public images (PerAda, Algorithm 1, 19–21)."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from perada.core.checks import OptionError, check_choice, check_integer, check_number, use_plain_numbers
from perada.core.ranks import Ranks
from perada.core.seeding import Streams
from perada.core.states import State, device_of, double, expand, is_finite, per_client, to_device_async
from perada.engine.engine import Engine
from perada.engine.loss_scaling import KeptScales, LossScales, MaskedAdam, MaskedOptimizer, MaskedSGD
from perada.server.aggregate import Updates
from perada.server.sums import SecureSums
from perada.tasks import Classification, Task

ServerOptimizer = Literal["adam", "sgd"]
STUDENT = slice(0, 1)
"""Rows of the loss scales that belong to the student, which is the only state with one."""
PUBLIC_BATCH = 512
"""Maximum number of public images in a batch for teachers."""
DENSE_BATCH = 16
"""Maximum number of images whose logits of all pixels are in memory, before the task selects those to distil."""
LEAST_AGREEMENT = 0.5
"""Share of public images on which the average and the ensemble must predict the same class, for the guard."""
LEAST_GAIN = 0.02
"""Entropy in nats by which the ensemble must predict classes more evenly than the average, for the guard."""


def predicted_class_entropy(logits: Tensor) -> float:
    """Compute the entropy, in nats, of the frequencies of predicted classes, from logits (N, K).

    >>> predicted_class_entropy(torch.tensor([[1.0, 0.0], [2.0, 0.0]]))
    0.0
    >>> round(predicted_class_entropy(torch.tensor([[1.0, 0.0], [0.0, 1.0]])), 4)
    0.6931
    """
    counts = logits.argmax(-1).bincount(minlength=logits.shape[-1]).double()
    return float(torch.special.entr(counts / counts.sum()).sum())


def ensemble_looks_better(average: Tensor, ensemble: Tensor) -> bool:
    """Return whether the ensemble seems better than the average, without labels.

    A worse model confuses many classes with a few, so the ensemble must predict the classes more evenly. If the two
    disagree on most images, these differ too much from the clients' images for such a conclusion.

    Args:
        average: Logits (N, K) of the average on public images.
        ensemble: Logits (N, K) of the ensemble on the same images.

    >>> right, lopsided = torch.eye(3), torch.eye(3)[[0, 0, 2]]
    >>> ensemble_looks_better(lopsided, right), ensemble_looks_better(right, lopsided)
    (True, False)
    """
    same_class = average.argmax(-1) == ensemble.argmax(-1)
    if int(same_class.sum()) <= LEAST_AGREEMENT * len(same_class):
        return False
    # A margin, since late in a run the two often differ on only a few images.
    return predicted_class_entropy(ensemble) > predicted_class_entropy(average) + LEAST_GAIN


@dataclass(frozen=True)
class Distillation:
    """Options of the server's distillation.

    Attributes:
        steps: Steps R per round; 0 turns distillation off.
        batch_size: Public images per step, or ``"full"`` for all of them.
        lr: Learning rate η_g.
        optimizer: ``"adam"`` or ``"sgd"``, reset in each round.
        schedule: ``"cosine"`` lets the rate fall to zero over the R steps of a round, or ``"constant"``.
        temperature: Softens both distributions.
        student_mode: ``"train"``: the student's norms use the public images of a step and move their running
            statistics, and dropout draws from streams derived from the seed; ``"eval"``: neither.
        teacher_mode: Whose statistics the trained norms of a teacher use. ``"public"``: those of the round's public
            images, up to 512 at a time, so that each image is seen once. ``"train"``: those of the public images
            of a step, as in a training step of the client. ``"eval"``: its running statistics, which are those of its
            client's images. In each mode the teachers stay as they are and drop nothing. Without trained BatchNorm all
            are the same.
        trust_region: Largest distance of the distilled model from the clients' average, as a share of the distance
            between that average and the model from which the round started. A student that ends farther away is moved
            back along the straight line, so that with less than 1 distillation never undoes the clients' progress,
            whatever its steps and rate. ``None`` (the paper has no such limit) leaves the student where it ends.
        until_round: Rounds from this one on (counted from 0) are not distilled; ``None`` distils every round.
        validate_every: Score the student every so many steps, and after the last one, on the labelled
            ``server_validation`` set, keep the best and fall back to the average where none is better; 0 (the paper
            assumes no labels on the server) never does.
        guard: ``"predictions"`` distils a round only if its public images suggest, without labels, that this helps: the
            ensemble and the clients' average predict the same class on most of them, and the ensemble, and then the
            student, predict the classes more evenly than the average. Otherwise the average stays. ``None`` distils
            always.
        share_steps: Divide the images of each step among several devices and add up their gradients, which pays for
            large batches. Results are then those of one device up to rounding, which Adam amplifies wherever a
            gradient is nearly zero; without it, all devices take the same steps.

    >>> Distillation(steps=20, batch_size=64).steps
    20
    """

    steps: int = 100
    batch_size: int | Literal["full"] = 128
    lr: float = 1e-3
    optimizer: ServerOptimizer = "adam"
    schedule: Literal["cosine", "constant"] = "cosine"
    temperature: float = 1.0
    student_mode: Literal["train", "eval"] = "eval"
    teacher_mode: Literal["public", "train", "eval"] = "public"
    trust_region: float | None = 0.25
    until_round: int | None = None
    validate_every: int = 0
    guard: Literal["predictions"] | None = None
    share_steps: bool = False

    def __post_init__(self) -> None:
        use_plain_numbers(self)
        check_integer("distillation: steps", self.steps, 0, hint="0 turns distillation off")
        check_integer("distillation: batch_size", self.batch_size, also=["full"])
        check_number("distillation: lr", self.lr, gt=0)
        check_choice("distillation: optimizer", self.optimizer, ["adam", "sgd"])
        check_choice("distillation: schedule", self.schedule, ["cosine", "constant"])
        check_number("distillation: temperature", self.temperature, ge=0.001, le=1000)
        check_choice("distillation: student_mode", self.student_mode, ["train", "eval"])
        check_choice("distillation: teacher_mode", self.teacher_mode, ["public", "train", "eval"])
        if self.trust_region is not None:
            check_number("distillation: trust_region", self.trust_region, gt=0, hint="null sets no limit")
        if self.guard is not None:
            check_choice("distillation: guard", self.guard, ["predictions"])
        check_choice("distillation: share_steps", self.share_steps, [True, False])
        if self.share_steps and self.student_mode == "train":
            raise OptionError(
                "distillation: share_steps=True would show the student's norms only the images of one device; choose "
                "student_mode='eval', or share_steps=False",
                name="distillation: share_steps",
                value=True,
            )
        check_integer("distillation: until_round", self.until_round, 0, optional=True)
        check_integer("distillation: validate_every", self.validate_every, 0, hint="0 turns validation off")

    def active(self, round: int) -> bool:
        """Return whether a round, counted from 0, is distilled."""
        if self.steps == 0:
            return False
        return self.until_round is None or round < self.until_round

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0 in each round.

        >>> [round(Distillation(steps=2, lr=1.0).learning_rate(step), 3) for step in range(2)]
        [1.0, 0.5]
        """
        if self.schedule == "constant":
            return self.lr
        return self.lr * (1 + math.cos(math.pi * step / self.steps)) / 2

    def make_optimizer(self, leaves: list[Tensor], masked: bool) -> torch.optim.Optimizer:
        """Return the student's optimiser.

        Args:
            leaves: Tensors (1, ...) to train.
            masked: Whether the student must be able to skip a step, as in float16.
        """
        if masked and self.optimizer == "adam":
            return MaskedAdam(leaves, self.lr)
        if masked:
            return MaskedSGD(leaves, self.lr)
        if self.optimizer == "adam":
            return torch.optim.Adam(leaves, lr=self.lr, fused=True)
        return torch.optim.SGD(leaves, lr=self.lr, fused=True)


@dataclass(frozen=True)
class TeacherBatches:
    """The batches of public images on which teachers run in one round.

    A simulation and each site of a deployment derive the same batches from the same steps.

    Attributes:
        index_batches: Indices of the public images of each batch.
        rows: Positions (steps, B) of the images of each step in the concatenation of all batches.
        batch_statistics: Whether norms use the statistics of each batch.
    """

    index_batches: tuple[Tensor, ...]
    rows: Tensor
    batch_statistics: bool

    @classmethod
    def of_steps(cls, indices: Tensor, distillation: Distillation, engine: Engine) -> "TeacherBatches":
        """Return the batches for the steps of a round.

        Args:
            indices: Indices (steps, B) of the public images of each step.
            distillation: Options of the distillation.
            engine: Engine that runs the teachers.
        """
        if distillation.teacher_mode == "eval" or not engine.has_batch_norms:
            # The logits of an image are the same in any batch, so teachers run on each image once.
            distinct, rows = torch.unique(indices, return_inverse=True)
            return cls(distinct.split(PUBLIC_BATCH), rows, False)
        if distillation.teacher_mode == "public":
            distinct, rows = _distinct_in_order_of_use(indices)
            # Batches of nearly equal size, since a small last batch would have poor statistics.
            num_batches = math.ceil(len(distinct) / PUBLIC_BATCH)
            return cls(distinct.tensor_split(num_batches), rows, True)
        # One batch per step, with sorted images. Statistics do not depend on their order, so that steps on the same
        # images, such as the complete public set, share a batch.
        sorted_indices, order = indices.sort(dim=1, stable=True)
        batches, batch_of_step = torch.unique(sorted_indices, dim=0, return_inverse=True)
        batch_size = indices.shape[1]
        start_of_batch = batch_of_step.unsqueeze(1) * batch_size
        place_in_batch = order.argsort(dim=1)
        return cls(batches.unbind(), start_of_batch + place_in_batch, True)

    @property
    def size(self) -> int:
        """Number of images in all batches together."""
        return sum(len(batch) for batch in self.index_batches)

    def logits(
        self, engine: Engine, teachers: State, read_images: Callable[[Tensor], Tensor], task: Task
    ) -> Iterator[Tensor]:
        """Yield the logits (C, B, K) of teachers (C, ...) on each batch, as far as the task distils them.

        Args:
            engine: Engine that runs the teachers.
            teachers: States (C, ...) of the teachers.
            read_images: Function of indices that returns the prepared images.
            task: What the models predict.
        """
        for batch in self.index_batches:
            images = read_images(batch)
            images_at_once = len(images)
            if task.per_pixel and not self.batch_statistics:
                images_at_once = DENSE_BATCH
            parts = []
            for part in images.split(images_at_once):
                logits = engine.shared_logits(teachers, part, batch_statistics=self.batch_statistics)
                parts.append(task.distilled(logits))
            yield torch.cat(parts, 1)


def _distinct_in_order_of_use(indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct indices in the order of their first use, and the place of each index in them.

    This order is random, since steps draw at random. The public set may be sorted by class, and batches in its order
    would differ in their classes.

    Args:
        indices: Indices (steps, B) of the public images of each step.

    Returns:
        The distinct indices (N,), and the places (steps, B).

    >>> _distinct_in_order_of_use(torch.tensor([[7, 3], [5, 7]]))
    (tensor([7, 3, 5]), tensor([[0, 1],
            [2, 0]]))
    """
    distinct, inverse = torch.unique(indices, return_inverse=True)
    num_uses = indices.numel()
    uses = torch.arange(num_uses)
    first_use = torch.full_like(distinct, num_uses).scatter_reduce(0, inverse.flatten(), uses, "amin")
    order = first_use.argsort()
    # argsort() of a permutation is its inverse.
    place_in_order = order.argsort()
    return distinct[order], place_in_order[inverse]


@dataclass(frozen=True)
class TrustRegion:
    """States whose distance from a center is at most a radius.

    Attributes:
        center: State in the center.
        radius: Largest Euclidean distance, over the tensors ``tensor_names`` together.
        tensor_names: Names of the tensors that count in the distance.
    """

    center: State
    radius: float
    tensor_names: tuple[str, ...]

    @classmethod
    def around(cls, average: State, previous: State, tensor_names: Iterable[str], share: float) -> "TrustRegion":
        """Return the region around an average.

        Args:
            average: State in the center.
            previous: Global state before the round.
            tensor_names: Names of the tensors that count in distances.
            share: Radius as a share of the distance between the two states.
        """
        tensor_names = tuple(name for name in tensor_names if name in previous)
        radius = share * _distance_between(average, previous, tensor_names)
        return cls(average, radius, tensor_names)

    def project(self, state: State) -> State:
        """Move a state outside of the region back along the straight line to the center; counters are unchanged.

        >>> region = TrustRegion({"w": torch.zeros(2)}, 1.0, ("w",))
        >>> region.project({"w": torch.tensor([0.0, 4.0])})["w"].tolist()
        [0.0, 1.0]
        """
        distance = _distance_between(state, self.center, self.tensor_names)
        # `distance <= radius` would not do: a state with NaN must be returned as it is, so that the caller can detect
        # it.
        if not distance > self.radius:
            return state
        share = self.radius / distance
        projected = dict(state)
        for key, value in state.items():
            if value.is_floating_point():
                projected[key] = self.center[key].lerp(value, share)
        return projected


def _distance_between(first_state: State, second_state: State, tensor_names: Iterable[str]) -> float:
    """Return the Euclidean distance between two states, over the tensors ``tensor_names`` together."""
    squares = [(double(first_state[name]) - double(second_state[name])).square().sum() for name in tensor_names]
    if not squares:
        return 0.0
    return math.sqrt(float(torch.stack(squares).sum()))


class ServerData(Protocol):
    """The server's images, which :class:`perada.data.FederatedDataModule` provides."""

    def public_indices(self, round: int, steps: int, batch_size: int | Literal["full"]) -> Tensor:
        """Return indices (steps, B) of public images: positions in the set, or of randomly augmented images."""

    def public_images(self, indices: Tensor, device: torch.device) -> Tensor:
        """Return prepared public images (len(indices), channels, height, width)."""

    def validation_batches(self, device: torch.device) -> Iterable[tuple[Tensor, Tensor]]:
        """Yield prepared images and labels of the server's validation set."""


@dataclass(frozen=True)
class SecureTeachers:
    """Teachers whose logits the server may see only as a sum over the clients.

    Attributes:
        secure_sums: Options of secure sums.
        teachers: The teachers, which replace those with which a distiller is called.
        logit_sum: Sum (N, K) of their logits on the N rows of the round's :class:`TeacherBatches`, in integers, if the
            sites of a deployment have computed it; None to compute it here.
    """

    secure_sums: SecureSums
    teachers: Updates
    logit_sum: Tensor | None = None


@dataclass(frozen=True)
class DistillationRound:
    """The inputs of a distiller that differ between rounds.

    Attributes:
        index: Number of the round, counted from 0.
        seed: Seed of the student's dropout.
        progress: Function that wraps the indices (steps, B) of the steps in a progress bar.
        secure: The teachers with secure sums; ``None`` without secure sums.
    """

    index: int = 0
    seed: int = 0
    progress: Callable[[Tensor], Iterable[Tensor]] = iter
    secure: SecureTeachers | None = None


@dataclass
class DistillationReport:
    """The results of a distiller in one round. Algorithms with several global models distil several times per round.

    Attributes:
        student: State from which the last distillation started.
        diverged: Whether a result was not finite, so that the student was returned instead.
        failed_teachers: For each teacher whose outputs are NaN, infinite or too large for a secure sum, the client
            whose model it is; None for the model of no single client.
        metrics: Metrics of the round.
    """

    student: State | None = None
    diverged: bool = False
    failed_teachers: list[int | None] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    def add(self, metric: str, value: float) -> None:
        """Add a value to a metric, which starts at 0."""
        self.metrics[metric] = self.metrics.get(metric, 0.0) + value


@dataclass
class Distiller:
    """Distils an ensemble of teachers into a student in one round, when it is called with both.

    Each rank runs the models of its clients once on each batch of :class:`TeacherBatches`, and ranks exchange only the
    sums of logits. All ranks take the same steps with the student.

    Attributes:
        engine: Engine that runs the models.
        distillation: Options of the distillation. In a round that is not distilled, the student is returned unchanged.
        parameters: Names of the tensors to train.
        server_data: The server's images.
        round: Inputs of the current round.
        task: What the models predict, which computes the loss of the distillation.
        ranks: The processes that share the work.
        scales: Loss scales in float16, which are kept between rounds.
        report: Report of this round.
    """

    engine: Engine
    distillation: Distillation
    parameters: tuple[str, ...]
    server_data: ServerData
    round: DistillationRound = field(default_factory=DistillationRound)
    task: Task = field(default_factory=Classification)
    ranks: Ranks = field(default_factory=Ranks)
    scales: KeptScales = field(default_factory=lambda: KeptScales(None))
    report: DistillationReport = field(default_factory=DistillationReport)

    def __call__(
        self,
        student: State,
        teachers: Updates | State,
        average_from: float | None = None,
        previous: State | None = None,
        clients_of_teachers: Sequence[int | None] = (),
    ) -> State:
        """Return the distilled student. A collective: all ranks must call this.

        Args:
            student: State from which the student starts. It is not changed.
            teachers: States (C, ...) that are the same on all ranks, or the :class:`Updates` of the clients of all
                ranks. Tensors that they lack are taken from the student, and are not trained.
            average_from: Return the mean of the student's states after this share of the steps, instead of the last
                state (stochastic weight averaging); ``None`` for the last state.
            previous: Global state before the round, which determines the trust region; ``None`` for no limit.
            clients_of_teachers: For the report, the client whose model each of the C teachers is, or None for the model
                of no single client. By default no teacher is a client's model.

        Returns:
            The distilled state, or the student itself if nothing was distilled or the result was not finite.
        """
        self.report.student = student
        device = device_of(student)
        teacher_updates = self._teachers_as_updates(teachers)
        scales = self.scales.open("student", 1, device)
        refined = None
        if self.distillation.active(self.round.index) and not self._is_only_teacher(student, teacher_updates):
            refined = self._refine_student(
                student,
                teacher_updates,
                clients_of_teachers=clients_of_teachers or [None] * teacher_updates.num_clients,
                average_from=average_from,
                previous=previous,
                scales=scales,
            )
        if scales is not None:
            self.scales.close("student", scales, torch.ones_like(scales.stepped), self.ranks)
            self.report.add("server/skipped_steps", float(scales.skipped))
        if not is_finite(student if refined is None else refined):
            self.report.diverged = True
            refined = None
        if self.distillation.guard is not None and self.distillation.active(self.round.index):
            self.report.add("server/distilled", float(refined is not None))
        return student if refined is None else refined

    def _teachers_as_updates(self, teachers: Updates | State) -> Updates:
        """Return the teachers as updates, which with secure sums are those of the round."""
        if self.round.secure is not None:
            return self.round.secure.teachers
        if isinstance(teachers, Updates):
            return teachers
        return Updates.replicated(teachers, self.ranks)

    def _is_only_teacher(self, student: State, teachers: Updates) -> bool:
        """Return whether the only teacher is equal to the student. A collective if there is one teacher.

        Adam would then turn rounding errors into steps of full size.
        """
        if teachers.num_clients != 1:
            return False
        for key, value in student.items():
            # A collective. All ranks gather the same tensor, so all leave this loop at the same name.
            if key in teachers and not torch.equal(teachers.gathered(key)[0], value):
                return False
        return True

    def _refine_student(
        self,
        student: State,
        teachers: Updates,
        *,
        clients_of_teachers: Sequence[int | None],
        average_from: float | None,
        previous: State | None,
        scales: LossScales | None,
    ) -> State | None:
        """Return the student after the steps of a round.

        It is None if the outputs of a teacher are not finite, or if the guard rejects the result.

        Args:
            student: State from which the student starts.
            teachers: The teachers.
            clients_of_teachers: As in :meth:`__call__`.
            average_from: As in :meth:`__call__`.
            previous: As in :meth:`__call__`.
            scales: Loss scales in float16; ``None`` in other precisions.
        """
        options = self.distillation
        indices = self.server_data.public_indices(self.round.index, options.steps, options.batch_size)
        batches = TeacherBatches.of_steps(indices, options, self.engine)
        logit_sum = self._logit_sum(teachers, student, batches)
        if logit_sum.failed_teachers:
            self.report.diverged = True
            self.report.failed_teachers += [clients_of_teachers[place] for place in logit_sum.failed_teachers]
            return None
        targets = self._mean_logits(logit_sum, teachers, student)
        average_logits = None
        if options.guard is not None:
            average_logits = self._public_logits(student, batches)
            if not ensemble_looks_better(average_logits, targets):
                return None

        trained = [name for name in self.parameters if name in teachers]
        region = None
        if options.trust_region is not None and previous is not None:
            region = TrustRegion.around(student, previous, trained, options.trust_region)
        rows = indices.shape[1]
        shares_steps = options.share_steps and 1 < self.ranks.size <= rows
        with torch.enable_grad():
            refined = self.train(
                student,
                self._image_logit_pairs(indices, batches, targets, shares_steps),
                average_from=average_from,
                scales=scales,
                total_rows=rows if shares_steps else None,
                trained_names=trained,
                region=region,
            )
        # Some GPU kernels are not deterministic, so that ranks may differ in the last bits.
        self.ranks.broadcast_(refined.values())
        # The caller handles a result that is not finite.
        if average_logits is not None and is_finite(refined):
            refined_entropy = predicted_class_entropy(self._public_logits(refined, batches))
            if refined_entropy <= predicted_class_entropy(average_logits):
                return None
        return refined

    def _logit_sum(self, teachers: Updates, student: State, teacher_batches: TeacherBatches) -> "_LogitSum":
        """Return the sum of the teachers' logits on the rows of all batches. A collective."""
        secure = self.round.secure
        if secure is None or secure.logit_sum is None:
            return self._sum_logits_over_ranks(teachers, student, teacher_batches)
        # Each site has checked its own logits.
        return _LogitSum(secure.logit_sum, logit_dtype=secure.logit_sum.dtype, failed_teachers=[])

    def _mean_logits(self, logit_sum: "_LogitSum", teachers: Updates, student: State) -> Tensor:
        """Compute the mean logits (N, K) of the teachers from their sum."""
        example = next(iter(student.values()))
        secure = self.round.secure
        if secure is None:
            mean = logit_sum.values / teachers.num_clients
            return mean.to(example.device, logit_sum.logit_dtype)
        mean = secure.secure_sums.real(logit_sum.values) / teachers.num_clients
        return mean.to(example.device, example.dtype)

    def _sum_logits_over_ranks(self, teachers: Updates, student: State, teacher_batches: TeacherBatches) -> "_LogitSum":
        """Sum the logits over the teachers of all ranks. A collective.

        Sums are in double precision, so that the order of ranks matters only in bits that are rounded away; secure sums
        are in integers. Teachers with logits that cannot be summed are left out, and reported by their places.
        """
        count = len(teachers.places)
        states = expand(student, max(1, count))
        if count:
            states |= teachers.local_rows
        device = device_of(student)
        sums = []
        # Batches are counted by place among the teachers of all ranks, on the device, so that the host waits for it
        # only once.
        num_failed_batches = torch.zeros(teachers.num_clients, dtype=torch.int64, device=device)
        local_places = to_device_async(torch.tensor(teachers.places, dtype=torch.int64), device)

        def read_images(rows: Tensor) -> Tensor:
            return self.server_data.public_images(rows, device)

        for logits in teacher_batches.logits(self.engine, states, read_images, self.task):
            if not count:
                # A rank without clients contributes zeros, in the shape of the student's logits.
                logits = torch.zeros_like(logits)
            values = double(logits)
            can_be_summed = self._can_be_summed(values, teachers.num_clients)
            num_failed_batches[local_places] += (~can_be_summed[:count]).long()
            values = torch.where(per_client(can_be_summed, values), values, 0.0)
            if self.round.secure is not None:
                values = self.round.secure.secure_sums.to_integers(values, teachers.num_clients)
            sums.append(values.sum(0))
            logit_dtype = logits.dtype
        total = torch.cat(sums)
        self.ranks.sum_([total, num_failed_batches])
        are_summed = (num_failed_batches == 0).cpu().tolist()
        failed_teachers = [place for place, is_summed in enumerate(are_summed) if not is_summed]
        return _LogitSum(total, logit_dtype, failed_teachers)

    def _can_be_summed(self, values: Tensor, num_clients: int) -> Tensor:
        """Return a mask (C,) of the teachers whose logits (C, ...) are finite and, in a secure sum, small enough."""
        limit = math.inf
        if self.round.secure is not None:
            limit = self.round.secure.secure_sums.limit(num_clients)
        # The comparison is false for NaN.
        return (values.abs() < limit).flatten(1).all(1)

    def _image_logit_pairs(
        self,
        indices: Tensor,
        teacher_batches: TeacherBatches,
        targets: Tensor,
        shares_steps: bool,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the images (B, ...) and the teachers' mean logits (B, K) of each step.

        Args:
            indices: Indices (steps, B) of the public images of each step.
            teacher_batches: Batches of the teachers.
            targets: Mean logits (N, K) of the teachers on the rows of all batches.
            shares_steps: Whether ranks share each step, so that only the rows of this rank are yielded.
        """
        device = targets.device
        local_rows = slice(None)
        if shares_steps:
            local_rows = slice(self.ranks.rank, None, self.ranks.size)
        for step, step_indices in enumerate(self.round.progress(indices)):
            images = self.server_data.public_images(step_indices[local_rows], device)
            target_rows = to_device_async(teacher_batches.rows[step, local_rows], device)
            yield images, targets[target_rows]

    def _public_logits(self, state: State, teacher_batches: TeacherBatches) -> Tensor:
        """Compute the logits (N, K) of one state on the rows of all batches, in evaluation mode. A collective."""
        device = device_of(state)
        model = expand(state, 1)
        # The model runs on each image once, even if the image has several rows.
        distinct, rows = torch.cat(teacher_batches.index_batches).unique(return_inverse=True)
        parts = []
        for indices in distinct.split(PUBLIC_BATCH):
            images = self.server_data.public_images(indices, device)
            parts.append(self.engine.shared_logits(model, images)[0])
        logits = torch.cat(parts)[rows.to(device)]
        # All ranks must decide from the same bits, or some would leave the collectives that follow.
        self.ranks.broadcast_([logits])
        return logits

    def _validation_accuracy(self, state: State) -> float:
        """Compute the accuracy of a state on the server's validation images."""
        device = device_of(state)
        correct = 0
        total = 0
        for images, labels in self.server_data.validation_batches(device):
            logits = self.engine.shared_logits(expand(state, 1), images)[0]
            has_label = self.task.known(labels)
            hits = (self.task.predicted(logits) == labels.long()) & has_label
            correct += int(hits.sum())
            total += int(has_label.sum())
        return correct / total

    def train(
        self,
        student: State,
        batches: Iterable[tuple[Tensor, Tensor]],
        *,
        average_from: float | None = None,
        scales: LossScales | None = None,
        total_rows: int | None = None,
        trained_names: Collection[str] | None = None,
        region: TrustRegion | None = None,
    ) -> State:
        """Train the student on the teachers' logits.

        Args:
            student: State from which the student starts. It is not changed.
            batches: Images (B, ...) and the teachers' mean logits (B, K) of each step.
            average_from: Return the mean of the states after this share of the steps; ``None`` for the last state.
            scales: Loss scales in float16; ``None`` in other precisions.
            total_rows: Number of images of a step on all ranks, if ranks share the steps. Gradients are then summed
                over the ranks, which is a collective in each step.
            trained_names: Names of the parameters to train; ``None`` for all.
            region: Trust region into which states are moved before they are scored or returned; ``None`` for no limit.

        Returns:
            The state after the last step or, with validation, the best of the states that were scored.
        """
        options = self.distillation
        state = {key: value.detach().clone().unsqueeze(0) for key, value in student.items()}
        candidates = state if trained_names is None else trained_names
        trained = {key: state[key].requires_grad_() for key in self.parameters if key in candidates}
        leaves = list(trained.values())
        optimizer = options.make_optimizer(leaves, masked=scales is not None)
        streams = Streams.derived(
            self.round.seed, "dropout-server", self.round.index, clients=[0], device=leaves[0].device
        )
        average = _RunningMean(first_step=self._first_averaged_step(average_from))
        best_state = student
        best_accuracy = self._validation_accuracy(student) if options.validate_every else 0.0
        for step, (images, targets) in enumerate(batches):
            for group in optimizer.param_groups:
                group["lr"] = options.learning_rate(step)
            logits = self._student_logits(state, images, scales, streams.fork("step", step))
            loss = self.task.distillation_loss(self.task.distilled(logits), targets, options.temperature)
            if total_rows is not None:
                # With this factor, the ranks' gradients sum to the gradient of the mean over all rows.
                loss = loss * (len(images) / total_rows)
            self._take_step(optimizer, leaves, loss, scales, ranks_share_step=total_rows is not None)
            average.update(step, trained)
            if options.validate_every and self._is_validated(step):
                candidate = _move_into_region(region, _unstack_single(state) | average.mean)
                accuracy = self._validation_accuracy(candidate)
                if accuracy > best_accuracy:
                    best_accuracy = accuracy
                    best_state = candidate
        if options.validate_every:
            return best_state
        return _move_into_region(region, _unstack_single(state) | average.mean)

    def _take_step(
        self,
        optimizer: torch.optim.Optimizer,
        leaves: Sequence[Tensor],
        loss: Tensor,
        scales: LossScales | None,
        ranks_share_step: bool,
    ) -> None:
        """Take an optimiser step on the leaves. A collective if ranks share the step: gradients are then summed."""
        optimizer.zero_grad()
        loss.backward()
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        if ranks_share_step:
            self.ranks.sum_(gradients)
        if scales is not None and isinstance(optimizer, MaskedOptimizer):
            # In float16 a student whose gradient overflowed skips the step.
            optimizer.step_rows(scales.update(gradients, STUDENT))
        else:
            optimizer.step()

    def _student_logits(self, state: State, images: Tensor, scales: LossScales | None, streams: Streams) -> Tensor:
        """Compute the student's logits (B, K).

        Args:
            state: State (1, ...) of the student.
            images: Images (B, ...).
            scales: Loss scales in float16; ``None`` in other precisions.
            streams: Random streams of the step, for dropout.
        """
        training = self.distillation.student_mode == "train"
        if scales is None:
            return self.engine.logits(state, images.unsqueeze(0), training=training, streams=streams)[0]
        scaled = scales.enter(state, STUDENT)
        logits = self.engine.logits(scaled, images.unsqueeze(0), training=training, streams=streams)
        return scales.leave(logits, STUDENT)[0]

    def _first_averaged_step(self, average_from: float | None) -> int:
        """Return the first step, counted from 0, whose state is averaged; after the last step if there is none."""
        if average_from is None:
            return self.distillation.steps
        # The product is rounded before ceil(), since products such as 0.3 · 10 may exceed an integer in floating point.
        return math.ceil(round(average_from * self.distillation.steps, 9))

    def _is_validated(self, step: int) -> bool:
        """Return whether the student is scored after a step, counted from 0."""
        steps_taken = step + 1
        return steps_taken % self.distillation.validate_every == 0 or steps_taken == self.distillation.steps


class _LogitSum(NamedTuple):
    """A sum of logits.

    Attributes:
        values: The sum (N, K), in double precision or integers.
        logit_dtype: Dtype of the logits that were summed.
        failed_teachers: Places of the teachers that are not in the sum, since some of their logits are NaN, infinite or
            too large for a secure sum.
    """

    values: Tensor
    logit_dtype: torch.dtype
    failed_teachers: list[int]


class _RunningMean:
    """Mean of tensors over the steps from ``first_step`` on, without the client axis; empty before that step."""

    def __init__(self, first_step: int) -> None:
        self.first_step = first_step
        self.mean: State = {}

    def update(self, step: int, tensors: State) -> None:
        """Include the tensors (1, ...) after a step in the mean."""
        if step < self.first_step:
            return
        count = step - self.first_step + 1
        for key, value in _unstack_single(tensors).items():
            self.mean[key] = self.mean.get(key, value).lerp(value, 1 / count)


def _move_into_region(region: TrustRegion | None, state: State) -> State:
    """Move a state into the trust region, if there is one."""
    if region is None:
        return state
    return region.project(state)


def _unstack_single(stack: State) -> State:
    """Copy the single state of a stack (1, ...)."""
    return {key: value.detach()[0].clone() for key, value in stack.items()}
