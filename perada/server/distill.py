# SPDX-License-Identifier: Apache-2.0
"""Ensemble distillation of the clients' models into the global one on public images (PerAda, Algorithm 1, 19–21)."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from perada.core.checks import OptionError, check_choice, check_integer, check_number
from perada.core.ranks import Ranks
from perada.core.seeding import Streams
from perada.core.states import State, device_of, expand, is_finite, to_device_async
from perada.engine.engine import Engine
from perada.engine.loss_scaling import KeptScales, LossScales, MaskedAdam, MaskedOptimizer, MaskedSGD
from perada.server.aggregate import Updates, double
from perada.server.sums import SecureSums

ServerOptimizer = Literal["adam", "sgd"]
STUDENT = slice(0, 1)
"""Rows of the loss scales that belong to the student, the only state that is scaled."""
PUBLIC_BATCH = 512
"""Number of public images prepared at once for teachers in evaluation mode."""
LEAST_AGREEMENT = 0.5
"""The guard's minimum share of public images on which average and ensemble must predict the same class."""
LEAST_GAIN = 0.02
"""The guard's minimum gain in nats: how much more evenly the ensemble must predict classes than the average."""


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float = 1.0, multilabel: bool = False) -> Tensor:
    """Compute the Kullback-Leibler divergence of the student from the teacher, mean over images: a scalar.

    The logits are divided by the temperature, and the loss is multiplied by its square (Hinton et al., 2015).

    Args:
        student: Logits (B, K).
        teacher: Logits (B, K).
        temperature: Softens both distributions.
        multilabel: Treat the K labels as independent Bernoulli variables, whose divergences are averaged.

    >>> distillation_loss(torch.ones(2, 3), torch.zeros(2, 3)).item()
    0.0
    """
    student = student / temperature
    teacher = teacher / temperature
    if not multilabel:
        log_student = F.log_softmax(student, -1)
        log_teacher = F.log_softmax(teacher, -1)
        return F.kl_div(log_student, log_teacher, log_target=True, reduction="batchmean") * temperature**2
    # KL(Bernoulli(p) || Bernoulli(q)) = cross-entropy(p, q) - entropy(p)
    p = teacher.sigmoid()
    cross_entropy = F.binary_cross_entropy_with_logits(student, p)
    return (cross_entropy - F.binary_cross_entropy_with_logits(teacher, p)) * temperature**2


def predicted_class_entropy(logits: Tensor) -> float:
    """Compute the entropy, in nats, of how often each class is predicted, from logits (N, K).

    >>> predicted_class_entropy(torch.tensor([[1.0, 0.0], [2.0, 0.0]]))
    0.0
    >>> round(predicted_class_entropy(torch.tensor([[1.0, 0.0], [0.0, 1.0]])), 4)
    0.6931
    """
    counts = logits.argmax(-1).bincount(minlength=logits.shape[-1]).double()
    return float(torch.special.entr(counts / counts.sum()).sum())


def ensemble_looks_better(average: Tensor, ensemble: Tensor) -> bool:
    """Return whether the ensemble seems better than the average, from their logits (N, K) on the same public images.

    No labels are needed: a worse model confuses many classes with a few, so the ensemble must predict the classes more
    evenly. If the two disagree on most images, these are unlike the clients' images, and the predicted classes mean
    nothing.

    >>> right, lopsided = torch.eye(3), torch.eye(3)[[0, 0, 2]]
    >>> ensemble_looks_better(lopsided, right), ensemble_looks_better(right, lopsided)
    (True, False)
    """
    same_class = average.argmax(-1) == ensemble.argmax(-1)
    if int(same_class.sum()) <= LEAST_AGREEMENT * len(same_class):
        return False
    # A few images more or less mean nothing, and late in a run the two are often that close.
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
            large batches. Results are then those of one device but for rounding, which Adam makes larger wherever a
            gradient is nearly zero; without it, all devices take the same steps.
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
        """Return the student's optimiser; ``masked`` in float16, where it must be able to skip a step."""
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
        batches: Indices of public images, by batch.
        rows: Position of each step's images, (steps, B), in the concatenation of all batches.
        batch_statistics: Whether norms use the statistics of each batch.
    """

    batches: tuple[Tensor, ...]
    rows: Tensor
    batch_statistics: bool

    @classmethod
    def of_steps(cls, indices: Tensor, options: Distillation, engine: Engine) -> "TeacherBatches":
        """Plan the teachers' passes for steps on the public images at ``indices`` (steps, B)."""
        if options.teacher_mode == "eval" or not engine.has_batch_norms:
            # An image's logits are the same in any batch, so each image is passed through the teachers once.
            distinct, rows = torch.unique(indices, return_inverse=True)
            return cls(distinct.split(PUBLIC_BATCH), rows, False)
        if options.teacher_mode == "public":
            distinct, rows = _distinct_in_order_of_use(indices)
            # Batches of nearly equal size, since the statistics of a small remainder would be poor.
            num_batches = math.ceil(len(distinct) / PUBLIC_BATCH)
            return cls(distinct.tensor_split(num_batches), rows, True)
        # One batch per step. Statistics do not depend on the order of images, so steps on the same images, such as all
        # of the public set, share a batch, in which the images are sorted.
        sorted_indices, order = indices.sort(dim=1, stable=True)
        batches, batch_of_step = torch.unique(sorted_indices, dim=0, return_inverse=True)
        batch_size = indices.shape[1]
        start_of_batch = batch_of_step.unsqueeze(1) * batch_size
        place_in_batch = order.argsort(dim=1)
        return cls(batches.unbind(), start_of_batch + place_in_batch, True)

    @property
    def size(self) -> int:
        """Number of images in all batches together."""
        return sum(len(batch) for batch in self.batches)

    def logits(self, engine: Engine, teachers: State, read_images: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
        """Yield the logits (C, B, K) of teachers (C, ...) on each batch.

        Args:
            engine: Runs the teachers.
            teachers: Stack (C, ...).
            read_images: Returns the prepared images at some indices.
        """
        for batch in self.batches:
            images = read_images(batch)
            yield engine.shared_logits(teachers, images, batch_statistics=self.batch_statistics)


def _distinct_in_order_of_use(indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct indices in the order in which steps (R, B) first use them, and the place of each index there.

    Steps draw at random. In the order of the public set, which may be sorted by class, batches would not be equally
    distributed.

    >>> _distinct_in_order_of_use(torch.tensor([[7, 3], [5, 7]]))
    (tensor([7, 3, 5]), tensor([[0, 1],
            [2, 0]]))
    """
    distinct, inverse = torch.unique(indices, return_inverse=True)
    num_uses = indices.numel()
    uses = torch.arange(num_uses)
    first_use = torch.full_like(distinct, num_uses).scatter_reduce(0, inverse.flatten(), uses, "amin")
    order = first_use.argsort()
    # The inverse of a permutation is where each of its entries stands.
    place_in_order = order.argsort()
    return distinct[order], place_in_order[inverse]


@dataclass(frozen=True)
class TrustRegion:
    """States whose distance from a center is at most a radius.

    Attributes:
        center: State in the middle.
        radius: Largest Euclidean distance, over all ``names`` together.
        names: Tensors that are measured.
    """

    center: State
    radius: float
    names: tuple[str, ...]

    @classmethod
    def around(cls, average: State, previous: State, names: Iterable[str], share: float) -> "TrustRegion":
        """Return the region around an ``average``, whose radius is a ``share`` of its distance from ``previous``."""
        names = tuple(name for name in names if name in previous)
        radius = share * _distance(average, previous, names)
        return cls(average, radius, names)

    def project(self, state: State) -> State:
        """Move a state that is outside back along the straight line to the center; counters stay.

        >>> region = TrustRegion({"w": torch.zeros(2)}, 1.0, ("w",))
        >>> region.project({"w": torch.tensor([0.0, 4.0])})["w"].tolist()
        [0.0, 1.0]
        """
        distance = _distance(state, self.center, self.names)
        # Not `distance <= radius`: a state with NaN is returned as it is, so that the caller notices.
        if not distance > self.radius:
            return state
        share = self.radius / distance
        projected = dict(state)
        for key, value in state.items():
            if value.is_floating_point():
                projected[key] = self.center[key].lerp(value, share)
        return projected


def _distance(first: State, second: State, names: Iterable[str]) -> float:
    """Return the Euclidean distance between two states, over the tensors ``names`` together."""
    squares = [(double(first[name]) - double(second[name])).square().sum() for name in names]
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
    """Teachers whose logits the server may only see as a sum over the clients.

    Attributes:
        sums: How the logits are added up.
        clients: The teachers, which take the place of those with which a distiller is called.
        logit_sum: The sum (N, K) of their logits on the N rows of the round's :class:`TeacherBatches`, as integers, if
            the sites of a deployment added them up themselves.
    """

    sums: SecureSums
    clients: Updates
    logit_sum: Tensor | None = None


@dataclass(frozen=True)
class DistillationRound:
    """The inputs that differ from round to round.

    Attributes:
        index: Number of the round, counted from 0.
        seed: Seed of the student's dropout.
        progress: Wraps the indices (steps, B) of the steps in a progress bar.
        secure: The teachers with secure sums; without them ``None``.
    """

    index: int = 0
    seed: int = 0
    progress: Callable[[Tensor], Iterable[Tensor]] = iter
    secure: SecureTeachers | None = None


@dataclass
class DistillationReport:
    """The results of a distiller in one round. Algorithms with several global models distil several times per round.

    Attributes:
        student: The state from which the last distillation started.
        diverged: Whether a result was NaN or infinite and the student was returned instead.
        metrics: Metrics of the round.
    """

    student: State | None = None
    diverged: bool = False
    metrics: dict[str, float] = field(default_factory=dict)

    def add(self, metric: str, value: float) -> None:
        """Add a value to a metric, which starts at 0."""
        self.metrics[metric] = self.metrics.get(metric, 0.0) + value


@dataclass
class Distiller:
    """Distils an ensemble of teachers into a student in one round; call it with both.

    Every rank runs its own clients' models once on each batch of :class:`TeacherBatches`; only the sum of their logits
    is exchanged. All ranks take the same steps with the student.

    Attributes:
        engine: Runs the models.
        options: Options; in a round that is not to be distilled the student is returned as it is.
        parameters: Names of the tensors to train.
        data: The server's images.
        round: The present round.
        multilabel: Whether an image may have several labels.
        ranks: The processes.
        scales: Loss scales in float16, which are kept between rounds.
        report: Report of what was done in this round.
    """

    engine: Engine
    options: Distillation
    parameters: tuple[str, ...]
    data: ServerData
    round: DistillationRound = field(default_factory=DistillationRound)
    multilabel: bool = False
    ranks: Ranks = field(default_factory=Ranks)
    scales: KeptScales = field(default_factory=lambda: KeptScales(None))
    report: DistillationReport = field(default_factory=DistillationReport)

    def __call__(
        self,
        student: State,
        teachers: Updates | State,
        average_from: float | None = None,
        previous: State | None = None,
    ) -> State:
        """Return the refined student. A collective: all ranks must call this alike.

        Args:
            student: State to start from, which is not changed.
            teachers: Stack (C, ...) that all ranks hold, or the :class:`Updates` of the clients of all ranks. Tensors
                that they lack are the student's, and are not trained.
            average_from: Return the mean of the student's states after the steps from this share of
                :attr:`Distillation.steps` on, instead of the last state (stochastic weight averaging).
            previous: Global state before the round, by which the trust region is measured; ``None`` for no limit.

        Returns:
            The refined state, or the student if nothing was or could be distilled.
        """
        self.report.student = student
        device = device_of(student)
        clients = self._clients(teachers)
        scales = self.scales.open("student", 1, device)
        refined = student
        if self.options.active(self.round.index) and not self._is_only_teacher(student, clients):
            refined = self._refine(student, clients, average_from=average_from, previous=previous, scales=scales)
        if scales is not None:
            self.scales.close("student", scales, torch.ones_like(scales.stepped), self.ranks)
            self.report.add("server/skipped_steps", float(scales.skipped))
        if not is_finite(refined):
            self.report.diverged = True
            refined = student
        if self.options.guard is not None and self.options.active(self.round.index):
            self.report.add("server/distilled", float(refined is not student))
        return refined

    def _clients(self, teachers: Updates | State) -> Updates:
        """Return the teachers as updates."""
        if self.round.secure is not None:
            return self.round.secure.clients
        if isinstance(teachers, Updates):
            return teachers
        return Updates.replicated(teachers, self.ranks)

    def _is_only_teacher(self, student: State, clients: Updates) -> bool:
        """Return whether the student would teach itself, where Adam would turn rounding errors into full steps.

        A collective if there is one teacher.
        """
        if clients.clients != 1:
            return False
        for key, value in student.items():
            # All ranks gather the same tensor, and so leave this loop at the same name.
            if key in clients and not torch.equal(clients.gathered(key)[0], value):
                return False
        return True

    def _refine(
        self,
        student: State,
        clients: Updates,
        *,
        average_from: float | None,
        previous: State | None,
        scales: LossScales | None,
    ) -> State:
        """Return the student after the steps of a round, or the student itself if the guard does not accept them."""
        options = self.options
        indices = self.data.public_indices(self.round.index, options.steps, options.batch_size)
        batches = TeacherBatches.of_steps(indices, options, self.engine)
        targets = self._targets(clients, student, batches)
        average_logits = None
        if options.guard is not None:
            average_logits = self._public_logits(student, batches)
            if not ensemble_looks_better(average_logits, targets):
                return student

        trained = [name for name in self.parameters if name in clients]
        region = None
        if options.trust_region is not None and previous is not None:
            region = TrustRegion.around(student, previous, trained, options.trust_region)
        rows = indices.shape[1]
        shares_steps = options.share_steps and 1 < self.ranks.size <= rows
        with torch.enable_grad():
            refined = self.train(
                student,
                self._pairs(indices, batches, targets, shares_steps),
                average_from=average_from,
                scales=scales,
                total_rows=rows if shares_steps else None,
                names=trained,
                region=region,
            )
        # Some kernels of a GPU do not give the same bits twice, so ranks may differ in the last ones.
        self.ranks.broadcast_(refined.values())
        # A result that is not finite is left to the caller.
        if average_logits is not None and is_finite(refined):
            refined_entropy = predicted_class_entropy(self._public_logits(refined, batches))
            if refined_entropy <= predicted_class_entropy(average_logits):
                return student
        return refined

    def _targets(self, clients: Updates, student: State, batches: TeacherBatches) -> Tensor:
        """Compute the teachers' mean logits (N, K) on the rows of the batches. A collective."""
        example = next(iter(student.values()))
        secure = self.round.secure
        if secure is None:
            total = self._sum_of_logits(clients, student, batches)
            mean = total.values / clients.clients
            return mean.to(example.device, total.logit_dtype)
        integers = secure.logit_sum
        if integers is None:
            integers = self._sum_of_logits(clients, student, batches).values
        mean = secure.sums.real(integers) / clients.clients
        return mean.to(example.device, example.dtype)

    def _sum_of_logits(self, clients: Updates, student: State, batches: TeacherBatches) -> "_LogitSum":
        """Add up the logits of all ranks' teachers. A collective.

        Sums are in double precision, so that they do not depend on the order of ranks, or integers if they are secure.
        """
        count = len(clients.places)
        states = expand(student, max(1, count))
        if count:
            states |= clients.local_rows
        device = device_of(student)
        sums = []
        for logits in batches.logits(self.engine, states, lambda rows: self.data.public_images(rows, device)):
            if not count:
                # A rank without clients takes part in the collective; the student's logits have the right shape.
                logits = torch.zeros_like(logits)
            values = double(logits)
            if self.round.secure is not None:
                values = self.round.secure.sums.to_integers(values, clients.clients)
            sums.append(values.sum(0))
            logit_dtype = logits.dtype
        total = torch.cat(sums)
        self.ranks.sum_([total])
        return _LogitSum(total, logit_dtype)

    def _pairs(
        self,
        indices: Tensor,
        batches: TeacherBatches,
        targets: Tensor,
        shares_steps: bool,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the images (B, ...) and the teachers' mean logits (B, K) of each step.

        If ranks share the steps, these are only this rank's rows.
        """
        device = targets.device
        local_rows = slice(None)
        if shares_steps:
            local_rows = slice(self.ranks.rank, None, self.ranks.size)
        for step, step_indices in enumerate(self.round.progress(indices)):
            images = self.data.public_images(step_indices[local_rows], device)
            target_rows = to_device_async(batches.rows[step, local_rows], device)
            yield images, targets[target_rows]

    def _public_logits(self, state: State, batches: TeacherBatches) -> Tensor:
        """Compute the logits (N, K) of one state on the rows of the batches, in evaluation mode. A collective."""
        device = device_of(state)
        model = expand(state, 1)
        # Each image is passed once, and its logits are repeated as often as it is among the rows.
        distinct, rows = torch.cat(batches.batches).unique(return_inverse=True)
        parts = []
        for indices in distinct.split(PUBLIC_BATCH):
            images = self.data.public_images(indices, device)
            parts.append(self.engine.shared_logits(model, images)[0])
        logits = torch.cat(parts)[rows.to(device)]
        # All ranks must come to the same decision.
        self.ranks.broadcast_([logits])
        return logits

    def _accuracy(self, state: State) -> float:
        """Compute the share of the server's validation labels that a state predicts."""
        device = device_of(state)
        correct = 0
        total = 0
        for images, labels in self.data.validation_batches(device):
            logits = self.engine.shared_logits(expand(state, 1), images)[0]
            if labels.dim() > 1:
                hits = (logits > 0) == labels.bool()
            else:
                hits = logits.argmax(-1) == labels
            correct += int(hits.sum())
            total += hits.numel()
        return correct / total

    def train(
        self,
        student: State,
        batches: Iterable[tuple[Tensor, Tensor]],
        *,
        average_from: float | None = None,
        scales: LossScales | None = None,
        total_rows: int | None = None,
        names: Collection[str] | None = None,
        region: TrustRegion | None = None,
    ) -> State:
        """Take the student's steps.

        Args:
            student: State to start from, which is not changed.
            batches: Images (B, ...) and the teachers' mean logits (B, K) of each step.
            average_from: Return the mean of the states from this share of the steps on.
            scales: Loss scales in float16.
            total_rows: Number of images of a step on all ranks, if they are divided among the ranks. Every rank's
                gradients are then added up, a collective in each step.
            names: Train only those of the parameters that are among these.
            region: Trust region into which states are moved before they are scored or returned.

        Returns:
            The state after the steps or, if the student is validated, the best of those that were scored.
        """
        options = self.options
        state = {key: value.detach().clone().unsqueeze(0) for key, value in student.items()}
        candidates = state if names is None else names
        trained = {key: state[key].requires_grad_() for key in self.parameters if key in candidates}
        leaves = list(trained.values())
        optimizer = options.make_optimizer(leaves, masked=scales is not None)
        streams = Streams.derived(
            self.round.seed, "dropout-server", self.round.index, clients=[0], device=leaves[0].device
        )
        average = _RunningMean(first_step=self._first_averaged_step(average_from))
        best_state = student
        best_accuracy = self._accuracy(student) if options.validate_every else 0.0
        for step, (images, targets) in enumerate(batches):
            for group in optimizer.param_groups:
                group["lr"] = options.learning_rate(step)
            logits = self._student_logits(state, images, scales, streams.fork("step", step))
            loss = distillation_loss(logits, targets, options.temperature, self.multilabel)
            if total_rows is not None:
                # The gradients of all ranks then add up to that of the mean over all rows.
                loss = loss * (len(images) / total_rows)
            self._descend(optimizer, leaves, loss, scales, ranks_share_step=total_rows is not None)
            average.update(step, trained)
            if options.validate_every and self._is_validated(step):
                candidate = _within(region, _unstacked(state) | average.mean)
                accuracy = self._accuracy(candidate)
                if accuracy > best_accuracy:
                    best_accuracy = accuracy
                    best_state = candidate
        if options.validate_every:
            return best_state
        return _within(region, _unstacked(state) | average.mean)

    def _descend(
        self,
        optimizer: torch.optim.Optimizer,
        leaves: Sequence[Tensor],
        loss: Tensor,
        scales: LossScales | None,
        ranks_share_step: bool,
    ) -> None:
        """Take an optimiser step on the leaves. A collective if ranks share the step, whose gradients are added up."""
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
        """Compute the logits (B, K) of the student (1, ...)."""
        training = self.options.student_mode == "train"
        if scales is None:
            return self.engine.logits(state, images.unsqueeze(0), training=training, streams=streams)[0]
        scaled = scales.enter(state, STUDENT)
        logits = self.engine.logits(scaled, images.unsqueeze(0), training=training, streams=streams)
        return scales.leave(logits, STUDENT)[0]

    def _first_averaged_step(self, average_from: float | None) -> int:
        """Return the first step, counted from 0, whose state is averaged; past the last if none is."""
        if average_from is None:
            return self.options.steps
        # Rounded first: 0.3 · 10 is a little more than 3.
        return math.ceil(round(average_from * self.options.steps, 9))

    def _is_validated(self, step: int) -> bool:
        """Return whether the student is scored after a step, counted from 0."""
        steps_taken = step + 1
        return steps_taken % self.options.validate_every == 0 or steps_taken == self.options.steps


class _LogitSum(NamedTuple):
    """A sum of logits (N, K), and the number format of the logits themselves."""

    values: Tensor
    logit_dtype: torch.dtype


class _RunningMean:
    """The mean of tensors (1, ...) over the steps, starting at the first that counts; empty before it."""

    def __init__(self, first_step: int) -> None:
        self.first_step = first_step
        self.mean: State = {}

    def update(self, step: int, tensors: State) -> None:
        """Add the tensors after a step."""
        if step < self.first_step:
            return
        count = step - self.first_step + 1
        for key, value in _unstacked(tensors).items():
            self.mean[key] = self.mean.get(key, value).lerp(value, 1 / count)


def _within(region: TrustRegion | None, state: State) -> State:
    """Move a state into the trust region, if there is one."""
    if region is None:
        return state
    return region.project(state)


def _unstacked(stack: State) -> State:
    """Copy the single state of a stack (1, ...)."""
    return {key: value.detach()[0].clone() for key, value in stack.items()}
