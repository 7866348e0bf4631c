# SPDX-License-Identifier: Apache-2.0
"""Ensemble distillation of the clients' models into the server's on unlabelled images (PerAda, Algorithm 1, 19–21)."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from perada.core.checks import OptionError, check_choice, check_integer, check_number
from perada.core.ranks import Ranks
from perada.core.seeding import Streams
from perada.core.states import State, expand, is_finite, to_device_async
from perada.engine.engine import Engine
from perada.engine.loss_scaling import KeptScales, LossScales, MaskedAdam, MaskedOptimizer, MaskedSGD
from perada.server.aggregate import Updates, double
from perada.server.sums import SecureSums

ServerOptimizer = Literal["adam", "sgd"]
STUDENT = slice(0, 1)
"""The student among the states that are scaled."""
PUBLIC_BATCH = 512
"""Public images that are prepared at once for teachers in evaluation mode."""


LEAST_AGREEMENT = 0.5
"""Share of public images on which average and ensemble must predict the same class, by the guard."""
LEAST_GAIN = 0.02
"""Nats by which the ensemble must predict the classes more evenly than the average, by the guard."""


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float = 1.0, multilabel: bool = False) -> Tensor:
    """Kullback-Leibler divergence of the student from the teacher, mean over images: a scalar.

    The logits (B, K) are divided by the temperature, the loss is multiplied by its square (Hinton et al., 2015). If
    ``multilabel``, each of the K is a Bernoulli probability of its own; their divergences are averaged over K.

    >>> distillation_loss(torch.ones(2, 3), torch.zeros(2, 3)).item()
    0.0
    """
    student, teacher = student / temperature, teacher / temperature
    if not multilabel:
        logs = F.log_softmax(student, -1), F.log_softmax(teacher, -1)
        return F.kl_div(*logs, log_target=True, reduction="batchmean") * temperature**2
    # KL(Bernoulli(p) || Bernoulli(q)) = cross-entropy(p, q) - entropy(p)
    p = teacher.sigmoid()
    cross_entropy = F.binary_cross_entropy_with_logits(student, p)
    return (cross_entropy - F.binary_cross_entropy_with_logits(teacher, p)) * temperature**2


def predicted_class_entropy(logits: Tensor) -> float:
    """Entropy, in nats, of how often each class is predicted, from logits (N, K).

    >>> predicted_class_entropy(torch.tensor([[1.0, 0.0], [2.0, 0.0]]))
    0.0
    >>> round(predicted_class_entropy(torch.tensor([[1.0, 0.0], [0.0, 1.0]])), 4)
    0.6931
    """
    counts = logits.argmax(-1).bincount(minlength=logits.shape[-1]).double()
    return float(torch.special.entr(counts / counts.sum()).sum())


def ensemble_looks_better(average: Tensor, ensemble: Tensor) -> bool:
    """Compare the average's and the ensemble's logits (N, K) on public images, without labels.

    Both see the same images. A model that works less well calls images of many classes by few names, so the ensemble
    must predict the classes more evenly. Where the two disagree on most images, these are not of the clients' kind,
    and nothing follows from the classes that are predicted.

    >>> right, lopsided = torch.eye(3), torch.eye(3)[[0, 0, 2]]
    >>> ensemble_looks_better(lopsided, right), ensemble_looks_better(right, lopsided)
    (True, False)
    """
    same_class = average.argmax(-1) == ensemble.argmax(-1)
    if int(same_class.sum()) <= LEAST_AGREEMENT * len(same_class):
        return False
    # A few images more or less say nothing, and late in a run the two are often that close.
    return predicted_class_entropy(ensemble) > predicted_class_entropy(average) + LEAST_GAIN


@dataclass(frozen=True)
class Distillation:
    """How the server distils.

    Attributes:
        steps: Steps R a round; 0 switches distillation off.
        batch_size: Public images a step, or ``"full"``.
        lr: Learning rate η_g.
        optimizer: ``"adam"`` or ``"sgd"``, started afresh each round.
        schedule: ``"cosine"`` lets the rate fall to zero over the R steps of a round, or ``"constant"``.
        temperature: Softens both distributions.
        student_mode: ``"train"``: the student's norms use the public images of a step and move their running
            statistics, and dropout draws from streams derived from the seed; ``"eval"``: neither.
        teacher_mode: Whose statistics the trained norms of a teacher use. ``"public"``: those of the round's public
            images, up to 512 at a time, so that each image is looked at once. ``"train"``: those of the public images
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
            gradient is nearly zero; without it all devices take all steps alike.
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
        name = "distillation: {}".format
        check_integer(name("steps"), self.steps, 0, hint="0 switches distillation off")
        check_integer(name("batch_size"), self.batch_size, also=["full"])
        check_number(name("lr"), self.lr, gt=0)
        check_choice(name("optimizer"), self.optimizer, ["adam", "sgd"])
        check_choice(name("schedule"), self.schedule, ["cosine", "constant"])
        check_number(name("temperature"), self.temperature, ge=0.001, le=1000)
        check_choice(name("student_mode"), self.student_mode, ["train", "eval"])
        check_choice(name("teacher_mode"), self.teacher_mode, ["public", "train", "eval"])
        if self.trust_region is not None:
            check_number(name("trust_region"), self.trust_region, gt=0, hint="null sets no limit")
        if self.guard is not None:
            check_choice(name("guard"), self.guard, ["predictions"])
        if self.share_steps and self.student_mode == "train":
            raise OptionError(
                "distillation: share_steps=True would give the student's norms the images of one device only; choose "
                "student_mode='eval', or share_steps=False",
                name="distillation: share_steps",
                value=True,
            )
        check_integer(name("until_round"), self.until_round, 0, optional=True)
        check_integer(name("validate_every"), self.validate_every, 0, hint="0 switches validation off")

    def active(self, round: int) -> bool:
        """Whether round ``round`` (from 0) is distilled."""
        return self.steps > 0 and (self.until_round is None or round < self.until_round)

    def learning_rate(self, step: int) -> float:
        """Learning rate of step ``step`` (from 0) of a round.

        >>> [round(Distillation(steps=2, lr=1.0).learning_rate(step), 3) for step in range(2)]
        [1.0, 0.5]
        """
        if self.schedule == "constant":
            return self.lr
        return self.lr * (1 + math.cos(math.pi * step / self.steps)) / 2

    def make_optimizer(self, leaves: list[Tensor], masked: bool) -> torch.optim.Optimizer:
        """The student's optimiser; ``masked`` where steps may be skipped, in float16."""
        if masked:
            return MaskedAdam(leaves, self.lr) if self.optimizer == "adam" else MaskedSGD(leaves, self.lr)
        kind = torch.optim.Adam if self.optimizer == "adam" else torch.optim.SGD
        return kind(leaves, lr=self.lr, fused=True)


@dataclass(frozen=True)
class TeacherBatches:
    """The batches of public images that teachers run on in one round.

    A simulation, and each site of a deployment, make the same ones of the same steps.

    Attributes:
        batches: Indices of public images.
        rows: Where the images of the steps, (steps, B), are among the rows of all batches, one after another.
        batch_statistics: Whether norms use the statistics of each batch.
    """

    batches: tuple[Tensor, ...]
    rows: Tensor
    batch_statistics: bool

    @classmethod
    def of_steps(cls, indices: Tensor, options: Distillation, engine: Engine) -> "TeacherBatches":
        """Plan the teachers' passes for steps on the public images at ``indices`` (steps, B)."""
        if options.teacher_mode == "eval" or not engine.has_batch_norms:
            # An image's logits are the same in any batch, so each image is looked at once.
            distinct, rows = torch.unique(indices, return_inverse=True)
            return cls(distinct.split(PUBLIC_BATCH), rows, False)
        if options.teacher_mode == "public":
            distinct, rows = _distinct_in_order_of_use(indices)
            # Of nearly equal sizes, since the statistics of a few images that are left over would be poor.
            return cls(distinct.tensor_split(math.ceil(len(distinct) / PUBLIC_BATCH)), rows, True)
        # A batch has the images of one step. Statistics do not depend on their order, so that steps on the same images,
        # such as those on all of the public set, share a batch.
        in_order, order = indices.sort(dim=1, stable=True)
        batches, batch_of_step = torch.unique(in_order, dim=0, return_inverse=True)
        place_in_batch = order.argsort(dim=1)
        rows = batch_of_step.unsqueeze(1) * indices.shape[1] + place_in_batch
        return cls(batches.unbind(), rows, True)

    @property
    def size(self) -> int:
        """How many images the batches have together."""
        return sum(map(len, self.batches))

    def logits(self, engine: Engine, teachers: State, images: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
        """Yield the logits (C, B, K) of teachers (C, ...) on each batch, whose prepared ``images`` are read for it."""
        for batch in self.batches:
            yield engine.shared_logits(teachers, images(batch), batch_statistics=self.batch_statistics)


def _distinct_in_order_of_use(indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct positions in the order in which steps (R, B) first use them, and each index as a place there.

    Steps draw at random. In the order of the public set, which may be sorted by class, batches would differ in kind.

    >>> _distinct_in_order_of_use(torch.tensor([[7, 3], [5, 7]]))
    (tensor([7, 3, 5]), tensor([[0, 1],
            [2, 0]]))
    """
    distinct, inverse = torch.unique(indices, return_inverse=True)
    uses = torch.arange(indices.numel())
    first_use = torch.full_like(distinct, indices.numel()).scatter_reduce(0, inverse.flatten(), uses, "amin")
    order = first_use.argsort()
    return distinct[order], order.argsort()[inverse]


@dataclass(frozen=True)
class TrustRegion:
    """States whose ``names`` together are at most ``radius`` (Euclidean distance) away from those of a ``center``."""

    center: State
    radius: float
    names: tuple[str, ...]

    @classmethod
    def around(cls, average: State, previous: State, names: Iterable[str], share: float) -> "TrustRegion":
        """Return the region around an ``average``, whose radius is a ``share`` of its distance from ``previous``."""
        names = tuple(name for name in names if name in previous)
        return cls(average, share * _distance(average, previous, names), names)

    def project(self, state: State) -> State:
        """Move a state that is outside back along the straight line to the center; counters stay.

        >>> region = TrustRegion({"w": torch.zeros(2)}, 1.0, ("w",))
        >>> region.project({"w": torch.tensor([0.0, 4.0])})["w"].tolist()
        [0.0, 1.0]
        """
        distance = _distance(state, self.center, self.names)
        if not distance > self.radius:  # NaN stays, for the caller to see
            return state
        share = self.radius / distance
        return {
            key: self.center[key].lerp(value, share) if value.is_floating_point() else value
            for key, value in state.items()
        }


def _distance(one: State, other: State, names: Iterable[str]) -> float:
    squares = [(double(one[name]) - double(other[name])).square().sum() for name in names]
    return math.sqrt(float(torch.stack(squares).sum())) if squares else 0.0


class ServerData(Protocol):
    """What the server needs of the data (:class:`perada.data.FederatedDataModule` has it)."""

    def public_indices(self, round: int, steps: int, batch_size: int | Literal["full"]) -> Tensor:
        """Indices of public images (steps, B): positions in the set, or of images changed at random."""

    def public_images(self, indices: Tensor, device: torch.device) -> Tensor:
        """Prepared public images (len(indices), channels, height, width)."""

    def validation_batches(self, device: torch.device) -> Iterable[tuple[Tensor, Tensor]]:
        """Prepared images and labels of the server's validation set."""


@dataclass
class Distiller:
    """Distils, in one round, the ensemble of teachers into a student: call it with both.

    Every rank runs its part of the teachers, on each batch of :class:`TeacherBatches` once: the sum of their logits is
    all that travels. The student's steps are taken by all ranks alike.

    Attributes:
        options: How; in a round that is not to be distilled the student stays as it is.
        parameters: Names of the tensors to train.
        seed: Of the student's dropout.
        progress: Wraps the steps in a progress bar.
        secure: How the teachers' logits are added up where the server sees sums alone, and who they are: the clients,
            whatever states it is called with.
        summed: The sum (N, K) of the clients' logits on the N rows of the round's :class:`TeacherBatches`, in whole
            numbers, where they added it up themselves.
        student: What was last distilled into, as it was before.
        diverged: Whether a result became NaN or infinite, and the student was returned instead.
    """

    engine: Engine
    options: Distillation
    parameters: tuple[str, ...]
    data: ServerData
    round: int = 0
    seed: int = 0
    multilabel: bool = False
    ranks: Ranks = field(default_factory=Ranks)
    scales: KeptScales = field(default_factory=lambda: KeptScales(None))
    progress: Callable[[Tensor], Iterable[Tensor]] = iter
    secure: tuple[SecureSums, Updates] | None = None
    summed: Tensor | None = None
    student: State | None = None
    diverged: bool = False
    metrics: dict[str, float] = field(default_factory=dict)

    def __call__(
        self,
        student: State,
        teachers: Updates | State,
        average_from: float | None = None,
        previous: State | None = None,
    ) -> State:
        """The refined state; the ``student``, from which it starts, is not changed.

        The teachers are a stack (C, ...), the same on all ranks, or the :class:`Updates` of the clients of all ranks.
        Names that they lack are the student's, and are not trained.
        With ``average_from`` the result is the mean of the student's states after the steps whose index is at least
        this share of :attr:`Distillation.steps`, instead of the last state (stochastic weight averaging).
        The trust region is measured by the ``previous`` global state; without it there is no limit.
        """
        self.student, device = student, next(iter(student.values())).device
        scales, refined = self.scales.open("student", 1, device), student
        sent = teachers if isinstance(teachers, Updates) else Updates.replicated(teachers, self.ranks)
        sent = sent if self.secure is None else self.secure[1]
        # Its own only teacher: Adam would turn rounding errors into steps of full length.
        alone = sent.clients == 1 and all(
            torch.equal(sent.gathered(key)[0], student[key]) for key in student if key in sent
        )
        if self.options.active(self.round) and not alone:
            indices = self.data.public_indices(self.round, self.options.steps, self.options.batch_size)
            rows = indices.shape[1]
            divided = self.options.share_steps and 1 < self.ranks.size <= rows
            batches = TeacherBatches.of_steps(indices, self.options, self.engine)
            targets = self._targets(sent, student, batches, device)
            average_logits = None if self.options.guard is None else self._public_logits(student, batches)
            if average_logits is None or ensemble_looks_better(average_logits, targets):
                pairs = self._pairs(indices, batches, targets, divided)
                trained = [name for name in self.parameters if name in sent]
                region = None
                if self.options.trust_region is not None and previous is not None:
                    region = TrustRegion.around(student, previous, trained, self.options.trust_region)
                with torch.enable_grad():
                    refined = self.train(
                        student, pairs, average_from, scales, rows if divided else None, trained, region
                    )
                self.ranks.broadcast_(refined.values())  # some kernels of a GPU do not give the same bits twice
                # A result that is not finite is dealt with below.
                if average_logits is not None and is_finite(refined):
                    entropy = predicted_class_entropy(self._public_logits(refined, batches))
                    if entropy <= predicted_class_entropy(average_logits):
                        refined = student
        if scales is not None:
            self.scales.close("student", scales, torch.ones_like(scales.stepped), self.ranks)
            skipped = self.metrics.get("server/skipped_steps", 0.0) + float(scales.skipped)
            self.metrics["server/skipped_steps"] = skipped
        finite = is_finite(refined)
        self.diverged |= not finite
        result = refined if finite else student
        if self.options.guard is not None and self.options.active(self.round):
            # An algorithm with several global models distils each of them in a round.
            distilled = self.metrics.get("server/distilled", 0.0) + float(result is not student)
            self.metrics["server/distilled"] = distilled
        return result

    def _targets(self, sent: Updates, student: State, batches: TeacherBatches, device: torch.device) -> Tensor:
        """The teachers' mean logits (N, K) on the rows of the batches."""
        total, dtype = self.summed, next(iter(student.values())).dtype
        if total is None:
            parts = list(self._own_sums(sent, student, batches, device))
            total, dtype = torch.cat([part for part, _ in parts]), parts[0][1] if self.secure is None else dtype
            self.ranks.sum_([total])
        if self.secure is not None:
            total = self.secure[0].real(total)
        return (total / sent.clients).to(device, dtype)

    def _pairs(
        self, indices: Tensor, batches: TeacherBatches, targets: Tensor, divided: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Images (B, ...) and the teachers' mean logits (B, K), a pair a step; where ``divided``, this rank's rows."""
        device = targets.device
        own = slice(self.ranks.rank, None, self.ranks.size) if divided else slice(None)
        for step, rows in enumerate(self.progress(indices)):
            yield self.data.public_images(rows[own], device), targets[to_device_async(batches.rows[step, own], device)]

    def _public_logits(self, state: State, batches: TeacherBatches) -> Tensor:
        """Logits (N, K) of one state on the rows of the batches, in evaluation mode."""
        device = next(iter(state.values())).device
        model = expand(state, 1)
        # An image counts as often as among the teachers' logits.
        distinct, rows = torch.cat(batches.batches).unique(return_inverse=True)
        parts = [
            self.engine.shared_logits(model, self.data.public_images(part, device))[0]
            for part in distinct.split(PUBLIC_BATCH)
        ]
        logits = torch.cat(parts)[rows.to(device)]
        self.ranks.broadcast_([logits])  # all ranks must decide alike
        return logits

    def _own_sums(
        self, teachers: Updates, student: State, batches: TeacherBatches, device: torch.device
    ) -> Iterator[tuple[Tensor, torch.dtype]]:
        """Yield, for each batch, the sum (B, K) of the logits of this rank's teachers, if any, and the logits' dtype.

        Sums are in double precision, or in whole numbers where they are secure ones.
        """
        count = len(teachers.places)
        states = expand(student, max(1, count)) | (teachers.own if count else {})
        for logits in batches.logits(self.engine, states, lambda rows: self.data.public_images(rows, device)):
            values = double(logits if count else torch.zeros_like(logits))
            if self.secure is not None:
                values = self.secure[0].to_integers(values, teachers.clients)
            yield values.sum(0), logits.dtype

    def _accuracy(self, state: State) -> float:
        """Share of the server's validation labels that a state gets right."""
        right = total = 0
        for x, y in self.data.validation_batches(next(iter(state.values())).device):
            logits = self.engine.shared_logits(expand(state, 1), x)[0]
            hits = (logits > 0) == y.bool() if y.dim() > 1 else logits.argmax(-1) == y
            right, total = right + int(hits.sum()), total + hits.numel()
        return right / total

    def train(
        self,
        student: State,
        batches: Iterable[tuple[Tensor, Tensor]],
        average_from: float | None = None,
        scales: LossScales | None = None,
        rows: int | None = None,
        names: Collection[str] | None = None,
        region: TrustRegion | None = None,
    ) -> State:
        """The state after the student's steps, each on images (B, ...) and the teachers' mean logits (B, K).

        Where images are divided among the ranks, ``rows`` is their number on all of them. Of the parameters those among
        ``names`` are trained, by default all. What is scored, and the result, is the state in the trust ``region``.
        """
        options, engine, training = self.options, self.engine, self.options.student_mode == "train"
        state = {key: value.detach().clone().unsqueeze(0) for key, value in student.items()}
        names = state if names is None else names
        trained = {key: state[key].requires_grad_() for key in self.parameters if key in names}
        leaves = list(trained.values())
        optimizer = options.make_optimizer(leaves, masked=scales is not None)
        best = (self._accuracy(student), student) if options.validate_every else None
        averages: State = {}
        device = leaves[0].device
        streams = Streams.derived(self.seed, "dropout-server", self.round, clients=[0], device=device)
        first = options.steps if average_from is None else math.ceil(round(average_from * options.steps, 9))
        for step, (x, teacher) in enumerate(batches):
            for group in optimizer.param_groups:
                group["lr"] = options.learning_rate(step)
            given = state if scales is None else scales.enter(state, STUDENT)
            logits = engine.logits(given, x.unsqueeze(0), training=training, streams=streams.fork("step", step))
            logits = logits if scales is None else scales.leave(logits, STUDENT)
            loss = distillation_loss(logits[0], teacher, options.temperature, self.multilabel)
            optimizer.zero_grad()
            if rows is not None:
                loss = loss * (len(x) / rows)
            loss.backward()
            gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
            if rows is not None:
                self.ranks.sum_(gradients)
            if scales is not None and isinstance(optimizer, MaskedOptimizer):
                optimizer.step_rows(scales.update(gradients, STUDENT))
            else:
                optimizer.step()
            if step >= first:
                for key, value in _first(trained).items():
                    averages[key] = averages.get(key, value).lerp(value, 1 / (step - first + 1))
            if best and ((step + 1) % options.validate_every == 0 or step + 1 == options.steps):
                reached = _within(region, _first(state) | averages)
                best = max(best, (self._accuracy(reached), reached), key=lambda pair: pair[0])
        return best[1] if best else _within(region, _first(state) | averages)


def _within(region: TrustRegion | None, state: State) -> State:
    return state if region is None else region.project(state)


def _first(stacked: State) -> State:
    return {key: value.detach()[0].clone() for key, value in stacked.items()}
