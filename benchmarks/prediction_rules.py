# SPDX-License-Identifier: Apache-2.0
"""Rules by which a client predicts with its personal and the global model, compared on held-out images.

perada's rule has three parts: the detector, which tells images that are typical of a client, the weight of the personal
model for these, and the classes of which the client has too few images, which are left to the global model. Detectors
are replaced in one table, weights and classes in another. Published rules are compared as a whole. Rules marked † need
images that the client holds out. Then each of its own images is predicted with what the other half of them gives.

Shapes: M clients, N held-out images, R training images of a client, K classes, D statistics, F features.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.experiments import mean_and_spread
from benchmarks.prediction_runs import FULL, QUICK, RunOutputs, outputs_by_setting
from perada.federation.both_models import personal_share
from perada.federation.typical_images import MIN_EXAMPLES, NEIGHBORS, TYPICAL_SHARE, TypicalImages
from perada.tasks.classification import LEAST_IMAGES_OF_CLASS

HELD_OUT_SHARE_KEPT = 0.95
"""Share of a client's own held-out images that detectors with a threshold from these keep."""
SHRINKAGE = 0.2
"""Weight of the diagonal in the covariance of the Gaussian detector."""
FOLDS = 5
"""Of the cross-fitted quantile of its distances."""
LEAST_VARIANCE = 1e-2
"""Added to the variances of scaled statistics, since a client may have fewer images than there are statistics."""
WEIGHTS = tuple(step / 10 for step in range(11))
"""Weights of the personal model among which held-out images choose."""
CONFIDENT = 0.7
"""Largest probability from which on a client trusts its personal model."""
STANDARD_ERRORS = 2
"""Difference to perada's rule, in standard errors, from which on a rule is counted as better or worse."""
FEDTHE_STEPS = 20
FEDTHE_RATE = 0.1

Rule = Callable[[RunOutputs], Tensor]
"""Returns the probabilities (M, N, K) that each client predicts for each held-out image."""
Detector = Callable[[RunOutputs], Tensor]
"""Returns a mask (M, N) of the held-out images that are typical of each client."""
Weight = Callable[[RunOutputs], Tensor]
"""Returns the weight (M, N) or (M, 1) of the personal model of each client for images that are typical of it."""
ErrorRates = Callable[[RunOutputs], Tensor]
"""Returns the error rate (M, N) or (M, 1) of the global model at each client."""


# Scores


@dataclass(frozen=True)
class RuleScores:
    """Scores (M,) of the clients of a run by a rule, on their own images and on those of all clients.

    Attributes:
        own: Accuracy on own images.
        everyone: Accuracy on all images.
        own_loss: Mean negative log-likelihood of own images.
        everyone_loss: That of all images.
    """

    own: Tensor
    everyone: Tensor
    own_loss: Tensor
    everyone_loss: Tensor

    @classmethod
    def of(cls, run: RunOutputs, probabilities: Tensor) -> "RuleScores":
        """Score predictions (M, N, K)."""
        targets = run.held_out.targets
        is_right = (probabilities.argmax(-1) == targets).double()
        target_index = targets.expand(run.num_clients, -1).unsqueeze(-1)
        losses = -probabilities.gather(-1, target_index).squeeze(-1).log()
        is_own = run.is_own.double()
        num_own = is_own.sum(1)
        return cls(
            own=(is_right * is_own).sum(1) / num_own,
            everyone=is_right.mean(1),
            own_loss=(losses * is_own).sum(1) / num_own,
            everyone_loss=losses.mean(1),
        )


ScoresBySetting = dict[str, list[RuleScores]]
"""The scores of a rule in each run, by setting."""


def scores_by_setting(rule: Rule, runs: dict[str, list[RunOutputs]]) -> ScoresBySetting:
    """Score a rule in all runs."""
    scores: ScoresBySetting = {}
    for setting, runs_of_setting in runs.items():
        scores[setting] = [RuleScores.of(run, rule(run)) for run in runs_of_setting]
    return scores


def difference(scores: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[float, float]:
    """Return the mean difference of the scores (M,) of runs in %, paired by client, and its standard error.

    >>> difference([torch.tensor([0.5, 0.7])], [torch.tensor([0.4, 0.4])])
    (20.0, 10.0)
    """
    differences = 100 * (torch.cat(list(scores)) - torch.cat(list(others))).double()
    standard_error = differences.std() / len(differences) ** 0.5
    return round(float(differences.mean()), 2), round(float(standard_error), 2)


def row_of(scores: ScoresBySetting, reference: ScoresBySetting) -> dict[str, Any]:
    """Return the columns of a rule: own / all images in % by setting, their mean, and how it compares to another one.

    Args:
        scores: Scores of the rule.
        reference: Scores of the rule that it is compared to.
    """
    row: dict[str, Any] = {}
    num_better = 0
    num_worse = 0
    values_by_run: list[list[float]] = []
    losses: list[float] = []
    details: dict[str, Any] = {}
    for setting, runs in scores.items():
        own = [100 * float(run.own.mean()) for run in runs]
        everyone = [100 * float(run.everyone.mean()) for run in runs]
        row[setting] = f"{fmean(own):.1f} / {fmean(everyone):.1f}"
        values_by_run += [own, everyone]
        losses += [float(run.own_loss.mean()) for run in runs] + [float(run.everyone_loss.mean()) for run in runs]
        comparisons = {
            "own": difference([run.own for run in runs], [run.own for run in reference[setting]]),
            "all": difference([run.everyone for run in runs], [run.everyone for run in reference[setting]]),
        }
        for mean, standard_error in comparisons.values():
            num_better += mean > STANDARD_ERRORS * standard_error
            num_worse += -mean > STANDARD_ERRORS * standard_error
        details[setting] = {"own": own, "all": everyone, "differences and standard errors": comparisons}
    row["mean"] = mean_and_spread([fmean(values) for values in zip(*values_by_run, strict=True)])
    row["loss"] = f"{fmean(losses):.2f}"
    row["better, worse"] = f"{num_better}, {num_worse}"
    return row | {"details": details}


# Detectors


@cache
def nearest_images(run: RunOutputs, typical_share: float = TYPICAL_SHARE) -> Tensor:
    """Take images whose third nearest training image is near: perada's detector if the share is not set."""
    masks = []
    for client in run.training:
        images = TypicalImages.of(client.statistics)
        if images.neighbors == 0:
            masks.append(torch.ones(len(run.held_out.targets), dtype=torch.bool))
            continue
        threshold = _distances_to_others(images.examples).quantile(typical_share)
        masks.append(images.distances(run.held_out.statistics) <= threshold)
    return torch.stack(masks)


def nearest_features(run: RunOutputs) -> Tensor:
    """Do the same with the global model's last features, scaled to length 1 (Sun et al., ICML 2022)."""
    features = F.normalize(run.held_out.features, dim=1)
    masks = []
    for client in run.training:
        if len(client.targets) < MIN_EXAMPLES:
            masks.append(torch.ones(len(features), dtype=torch.bool))
            continue
        examples = F.normalize(client.features, dim=1)
        threshold = _distances_to_others(examples).quantile(TYPICAL_SHARE)
        masks.append(torch.cdist(features, examples).kthvalue(NEIGHBORS, 1).values <= threshold)
    return torch.stack(masks)


def _distances_to_others(examples: Tensor) -> Tensor:
    """Return the distance (R,) of each example (R, D) to its third nearest other one."""
    distances = torch.cdist(examples, examples, compute_mode="donot_use_mm_for_euclid_dist")
    distances.fill_diagonal_(torch.inf)
    return distances.kthvalue(NEIGHBORS, 1).values


@cache
def gaussian(run: RunOutputs, typical_share: float = 0.95) -> Tensor:
    """Take images with a small Mahalanobis distance to the training images (Lee et al., NeurIPS 2018).

    The covariance is shrunk towards its diagonal. The threshold is a quantile of the distances of training images to
    the Gaussian of the other folds.
    """
    masks = []
    for client in run.training:
        statistics = client.statistics.double()
        if len(statistics) < MIN_EXAMPLES:
            masks.append(torch.ones(len(run.held_out.targets), dtype=torch.bool))
            continue
        folds = torch.arange(len(statistics)) % FOLDS
        distances = []
        for fold in range(FOLDS):
            distances.append(mahalanobis(statistics[folds != fold], statistics[folds == fold]))
        threshold = torch.cat(distances).quantile(typical_share)
        masks.append(mahalanobis(statistics, run.held_out.statistics.double()) <= threshold)
    return torch.stack(masks)


def mahalanobis(examples: Tensor, statistics: Tensor) -> Tensor:
    """Return the squared distance (B,) of statistics (B, D) to the Gaussian of examples (R, D)."""
    scaling = TypicalImages.of(examples)
    covariance = torch.cov(scaling.examples.T)
    diagonal = covariance.diagonal().diag()
    shrunk = (1 - SHRINKAGE) * covariance + SHRINKAGE * diagonal
    shrunk += LEAST_VARIANCE * torch.eye(len(shrunk), dtype=shrunk.dtype)
    scaled = (statistics - scaling.mean) / scaling.scale
    return (scaled * torch.linalg.solve(shrunk, scaled.T).T).sum(1)


def energy(logits: Tensor) -> Tensor:
    """Return the energy (...) of logits (..., K), which is large for foreign images (Liu et al., NeurIPS 2020)."""
    return -logits.logsumexp(-1)


def least_confidence(logits: Tensor) -> Tensor:
    """Return minus the largest probability (...), given logits (..., K) (Hendrycks and Gimpel, ICLR 2017)."""
    return -logits.softmax(-1).amax(-1)


def score_of_training_images(score: Callable[[Tensor], Tensor], run: RunOutputs) -> Tensor:
    """Take images whose score by the personal model is not larger than that of almost all training images."""
    thresholds = torch.stack([score(client.personal).quantile(TYPICAL_SHARE) for client in run.training])
    return score(run.held_out.personal) <= thresholds.unsqueeze(1)


def score_of_held_out_images(score: Callable[[Tensor], Tensor], run: RunOutputs) -> Tensor:
    """Take images whose score by the personal model is not larger than that of almost all own held-out images."""
    scores = score(run.held_out.personal)
    mask = torch.zeros(scores.shape, dtype=torch.bool)
    for client, client_scores in enumerate(scores):
        for predicted, known in splits_of(run, client):
            threshold = client_scores[known].quantile(HELD_OUT_SHARE_KEPT)
            mask[client, predicted] = client_scores[predicted] <= threshold
    return mask


def splits_of(run: RunOutputs, client: int) -> list[tuple[Tensor, Tensor]]:
    """Return masks (N,) of images to predict and of own images that may be used for it.

    Every second own image is used for the others, and the other way round, all own images for those of other clients.
    """
    is_own = run.is_own[client]
    is_even = is_own & (is_own.cumsum(0) % 2 == 0)
    is_odd = is_own & ~is_even
    # A client with a single own image knows nothing else.
    if not is_even.any():
        is_even = is_odd
    return [(is_odd, is_even), (is_even, is_odd), (~is_own, is_own)]


def class_at_home(run: RunOutputs, least_images: int) -> Tensor:
    """Take images whose class, by the global model, at least so many training images of the client have."""
    predicted = run.held_out.shared.argmax(-1)
    return (class_counts(run) >= least_images)[:, predicted]


def class_counts(run: RunOutputs) -> Tensor:
    """Return the numbers (M, K) of training images of each class."""
    num_classes = run.held_out.shared.shape[-1]
    return torch.stack([client.targets.bincount(minlength=num_classes) for client in run.training])


def near_and_class_at_home(run: RunOutputs, least_images: int) -> Tensor:
    """Take images that are typical for perada, and whose class the client has."""
    return nearest_images(run) & class_at_home(run, least_images)


def everything(run: RunOutputs, is_typical: bool) -> Tensor:
    """Take all images, or none."""
    return torch.full(run.is_own.shape, is_typical)


# Weights of the personal model


def training_errors(run: RunOutputs) -> Tensor:
    """Return the share (M, 1) of each client's training images that the global model gets wrong, as perada does."""
    rates = [float((client.shared.argmax(-1) != client.targets).double().mean()) for client in run.training]
    return torch.tensor(rates, dtype=torch.double).unsqueeze(1)


def training_doubts(run: RunOutputs) -> Tensor:
    """Return one minus the mean probability (M, 1) that the global model gives the right classes of training images."""
    doubts = []
    for client in run.training:
        probabilities = client.shared.softmax(-1).gather(1, client.targets.unsqueeze(1))
        doubts.append(1 - float(probabilities.mean()))
    return torch.tensor(doubts, dtype=torch.double).unsqueeze(1)


def held_out_errors(run: RunOutputs) -> Tensor:
    """Return the error rate (M, N) of the global model on held-out images of the client, other than the one (N)."""
    is_wrong = (run.held_out.shared.argmax(-1) != run.held_out.targets).double()
    rates = torch.zeros(run.is_own.shape, dtype=torch.double)
    for client in range(run.num_clients):
        for predicted, known in splits_of(run, client):
            rates[client, predicted] = is_wrong[known].mean()
    return rates


def perada_weight(run: RunOutputs, error_rates: ErrorRates = training_errors) -> Tensor:
    """Return perada's weight."""
    rates = error_rates(run)
    weights = [personal_share(rate) for rate in rates.flatten().tolist()]
    return torch.tensor(weights, dtype=torch.double).view(rates.shape)


def growing_weight(run: RunOutputs, growth: float) -> Tensor:
    """Return 1/2 + growth × the global model's error on training images, and at most 1."""
    return (0.5 + growth * training_errors(run)).clamp(max=1)


def fixed_weight(run: RunOutputs, weight: float) -> Tensor:
    """Return the same weight for all clients."""
    return torch.full((run.num_clients, 1), weight, dtype=torch.double)


def likeliest_weight(run: RunOutputs) -> Tensor:
    """Return the weight with the largest likelihood of own held-out images."""
    weights = torch.zeros(run.is_own.shape, dtype=torch.double)
    personal = run.held_out.personal.softmax(-1)
    shared = run.held_out.shared.softmax(-1)
    rows = torch.arange(len(run.held_out.targets))
    personal_of_target = personal[:, rows, run.held_out.targets]
    shared_of_target = shared[rows, run.held_out.targets]
    grid = torch.tensor(WEIGHTS, dtype=torch.double).unsqueeze(1)
    for client in range(run.num_clients):
        likelihoods = (grid * personal_of_target[client] + (1 - grid) * shared_of_target).log()
        for predicted, known in splits_of(run, client):
            best = likelihoods[:, known].mean(1).argmax()
            weights[client, predicted] = grid[best]
    return weights


def entropy_weight(run: RunOutputs) -> Tensor:
    """Weight each model by exp(−entropy) of its prediction."""
    personal = entropy(run.held_out.personal)
    shared = entropy(run.held_out.shared)
    return torch.sigmoid(shared - personal)


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy (...) of the prediction, given logits (..., K)."""
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def fedthe_weight(run: RunOutputs) -> Tensor:
    """Return the weights of FedTHE (Jiang and Lin, ICLR 2023), which are optimized for each image.

    They minimize s H + (1 − s) (w ‖h − c‖ + (1 − w) ‖h − g‖), with the cosine s of both predictions, the entropy H of
    the mixed logits, features h of the image and their means c of the client and g of all clients. w begins at 1/2 and
    takes 20 steps of Adam on the logits of both weights.

    In FedTHE two heads share a feature extractor. Here the models have separate adapters, and h are the inputs of the
    global model's last layer, whose means clients would send. Its average with the last images' features is left out,
    since clients predict each image on its own.
    """
    personal = run.held_out.personal
    shared = run.held_out.shared.expand_as(personal)
    features = run.held_out.features.double()
    centres = torch.stack([client.features.double().mean(0) for client in run.training])
    to_client = torch.cdist(features, centres).T
    to_everyone = (features - centres.mean(0)).norm(dim=1)
    similarity = F.cosine_similarity(personal.softmax(-1), shared.softmax(-1), dim=-1)
    logits_of_weights = torch.zeros(2, *run.is_own.shape, dtype=torch.double, requires_grad=True)
    optimizer = torch.optim.Adam([logits_of_weights], lr=FEDTHE_RATE)
    for _ in range(FEDTHE_STEPS):
        weights = logits_of_weights.softmax(0)
        mixed = weights[0].unsqueeze(-1) * personal + weights[1].unsqueeze(-1) * shared
        distance = weights[0] * to_client + weights[1] * to_everyone
        # The images are independent, and so are their parts of the sum.
        loss = (similarity * entropy(mixed) + (1 - similarity) * distance).sum()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return logits_of_weights.detach().softmax(0)[0]


# Rules


def mixture(run: RunOutputs, detector: Detector, weight: Weight) -> Tensor:
    """Return α p + (1 − α) q for typical images, and q for others, with p of the personal and q of the global model."""
    weights = torch.where(detector(run), weight(run), 0.0).unsqueeze(-1)
    return weights * run.held_out.personal.softmax(-1) + (1 - weights) * run.held_out.shared.softmax(-1)


def both_models(
    run: RunOutputs,
    detector: Detector,
    least_images: int = LEAST_IMAGES_OF_CLASS,
    error_rates: ErrorRates = training_errors,
) -> Tensor:
    """Mix with perada's weight, after leaving classes with fewer training images to the global model."""
    alpha = perada_weight(run, error_rates)
    trust = (2 * (1 - alpha)).clamp(max=1).unsqueeze(-1)
    is_unknown = (class_counts(run) < least_images).unsqueeze(1)
    shared = run.held_out.shared.softmax(-1)
    of_unknown = trust * shared * is_unknown
    completed = of_unknown + (1 - of_unknown.sum(-1, keepdim=True)) * run.held_out.personal.softmax(-1)
    weights = torch.where(detector(run), alpha, 0.0).unsqueeze(-1)
    return weights * completed + (1 - weights) * shared


def sum_of_logits(run: RunOutputs) -> Tensor:
    """Add the logits, as FedRoD does with a generic and a personal head (Chen and Chao, ICLR 2022)."""
    return (run.held_out.personal + run.held_out.shared).softmax(-1)


def fedthe(run: RunOutputs) -> Tensor:
    """Mix the logits of all images by the weights of FedTHE."""
    weights = fedthe_weight(run).unsqueeze(-1)
    return (weights * run.held_out.personal + (1 - weights) * run.held_out.shared).softmax(-1)


def surer_model(run: RunOutputs) -> Tensor:
    """Predict with the model whose largest probability is larger."""
    personal = run.held_out.personal.softmax(-1)
    shared = run.held_out.shared.softmax(-1)
    is_surer = personal.amax(-1) >= shared.amax(-1)
    return torch.where(is_surer.unsqueeze(-1), personal, shared)


def confident_personal_model(run: RunOutputs) -> Tensor:
    """Predict with the personal model where its largest probability is large, and with the global one elsewhere."""
    personal = run.held_out.personal.softmax(-1)
    is_confident = personal.amax(-1) >= CONFIDENT
    return torch.where(is_confident.unsqueeze(-1), personal, run.held_out.shared.softmax(-1))


def class_shares(run: RunOutputs) -> Tensor:
    """Multiply the global model's probabilities by the roots of the client's shares of classes."""
    # One more image of each class, so that no class is impossible.
    counts = (class_counts(run) + 1).double()
    shares = counts / counts.sum(1, keepdim=True)
    products = run.held_out.shared.softmax(-1) * shares.sqrt().unsqueeze(1)
    return products / products.sum(-1, keepdim=True)


def always(weight: float) -> Rule:
    """Return a rule that mixes both models of all images by one weight."""
    return partial(mixture, detector=partial(everything, is_typical=True), weight=partial(fixed_weight, weight=weight))


PERADA = partial(both_models, detector=nearest_images)
"""perada's rule (docs/prediction.md)."""
DETECTORS: dict[str, Detector] = {
    "3rd nearest training image, 99 % (perada)": nearest_images,
    "the same, 95 %": partial(nearest_images, typical_share=0.95),
    "3rd nearest by last features, 99 %": nearest_features,
    "Gaussian, 95 %": gaussian,
    "Gaussian, 99 %": partial(gaussian, typical_share=0.99),
    "energy, 99 % of training images": partial(score_of_training_images, energy),
    "energy, 95 % of held-out images †": partial(score_of_held_out_images, energy),
    "largest probability, 99 % of training images": partial(score_of_training_images, least_confidence),
    "largest probability, 95 % of held-out images †": partial(score_of_held_out_images, least_confidence),
    "class with an image at home": partial(class_at_home, least_images=1),
    "class with 10 images at home": partial(class_at_home, least_images=10),
    "perada, and class with an image at home": partial(near_and_class_at_home, least_images=1),
    "all images are typical": partial(everything, is_typical=True),
    "no image is typical": partial(everything, is_typical=False),
}
"""Detectors, each with perada's weight, and unknown classes left to the global model."""
WEIGHT_RULES: dict[str, Weight] = {
    "½ + 2 e": perada_weight,
    "½ + e": partial(growing_weight, growth=1.0),
    "½ + 4 e": partial(growing_weight, growth=4.0),
    "1": partial(fixed_weight, weight=1.0),
    "0.7": partial(fixed_weight, weight=0.7),
    "0.5": partial(fixed_weight, weight=0.5),
    "0.3": partial(fixed_weight, weight=0.3),
    "likeliest for held-out images †": likeliest_weight,
    "exp(−entropy)": entropy_weight,
    "FedTHE's": fedthe_weight,
}
"""Weights of the personal model, each with perada's detector, for all classes."""
ERROR_RATES: dict[str, ErrorRates] = {
    "e: one minus the mean probability of the right class": training_doubts,
    "e: errors on held-out images †": held_out_errors,
}
"""What else the weight ½ + 2 e, and the trust in classes, may follow."""
RULES: dict[str, Rule] = {
    "`both` (perada)": PERADA,
    "`personal`": always(1.0),
    "`global`": always(0.0),
    "mean, α = 0.5": always(0.5),
    "sum of logits (FedRoD)": sum_of_logits,
    "FedTHE": fedthe,
    "the surer model": surer_model,
    "personal if its probability is 0.7 or more": confident_personal_model,
    "global × √(own shares of classes)": class_shares,
    "Gaussian, 95 %; likeliest α †": partial(mixture, detector=gaussian, weight=likeliest_weight),
    "Gaussian, 95 %; α = 1": partial(mixture, detector=gaussian, weight=partial(fixed_weight, weight=1.0)),
}
"""Complete rules."""


# Benchmarks


def prediction_detectors(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Give the scores of detectors with perada's weight, and which images they take."""
    runs = _runs(quick)
    reference = scores_by_setting(PERADA, runs)
    for name, detector in DETECTORS.items():
        scores = scores_by_setting(partial(both_models, detector=detector), runs)
        own_shares: dict[str, float] = {}
        foreign_shares: dict[str, float] = {}
        for setting, runs_of_setting in runs.items():
            own_shares[setting] = fmean(_share_of(detector(run), run.is_own) for run in runs_of_setting)
            foreign_shares[setting] = fmean(_share_of(detector(run), ~run.is_own) for run in runs_of_setting)
        typical = {
            "own typical": f"{fmean(own_shares.values()):.0f}",
            "others' typical": f"{fmean(foreign_shares.values()):.0f}",
            "typical": {"own": own_shares, "others": foreign_shares},
        }
        yield {"detector": name} | row_of(scores, reference) | typical


def prediction_weights(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Give the scores of weights of the personal model with perada's detector."""
    runs = _runs(quick)
    reference = scores_by_setting(PERADA, runs)
    for least_images in (LEAST_IMAGES_OF_CLASS, 1, 5):
        rule = partial(both_models, detector=nearest_images, least_images=least_images)
        name = f"½ + 2 e, classes of fewer than {least_images} images left to the global model"
        yield {"weight α": name} | row_of(scores_by_setting(rule, runs), reference)
    for name, error_rates in ERROR_RATES.items():
        rule = partial(both_models, detector=nearest_images, error_rates=error_rates)
        yield {"weight α": name} | row_of(scores_by_setting(rule, runs), reference)
    for name, weight in WEIGHT_RULES.items():
        scores = scores_by_setting(partial(mixture, detector=nearest_images, weight=weight), runs)
        yield {"weight α": name} | row_of(scores, reference)


def prediction_rules(device: torch.device, repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Give the scores of complete rules."""
    runs = _runs(quick)
    reference = scores_by_setting(PERADA, runs)
    for name, rule in RULES.items():
        yield {"rule": name} | row_of(scores_by_setting(rule, runs), reference)


def _runs(quick: bool) -> dict[str, list[RunOutputs]]:
    return outputs_by_setting(QUICK if quick else FULL)


def _share_of(mask: Tensor, images: Tensor) -> float:
    """Return the share in % of each client's ``images`` (M, N) that are in a mask (M, N), mean over clients."""
    shares = (mask & images).sum(1) / images.sum(1)
    return 100 * float(shares.mean())
