# SPDX-License-Identifier: Apache-2.0
"""What cannot be private is rejected through ``perada.finetune``, in one line, before anything is trained."""

import copy
import warnings

import peft
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.plugins import MixedPrecision
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

import perada
from perada.algorithms import Algorithm, FedAvg, FedEnsemble, FedROD, Moon, PerAda
from perada.data import IID, Digits
from perada.server import FLTrust

from ..algorithms.problems import SIZES, network, task
from .private_loop import train

PRIVATE = {"noise_multiplier": 8.0, "delta": 1e-3}
WITHOUT_KD = PerAda(distill=False)


pytestmark = pytest.mark.usefixtures("quick_epsilon")


class Started(pl.Callback):
    """Whether a local step was begun."""

    steps = 0

    def on_train_batch_start(self, *_):
        self.steps += 1


def assert_rejected(message, algorithm=WITHOUT_KD, privacy=PRIVATE, callbacks=(), steps=0, kind=ValueError, **options):
    started = Started()
    with pytest.raises(kind, match=message) as raised:
        train(algorithm, privacy, callbacks=[started, *callbacks], **options)
    assert "\n" not in str(raised.value)
    assert started.steps == steps


def coloured(test=False, public=False):
    """Two clients with coloured images of 32×32 for timm's networks."""
    random = torch.Generator().manual_seed(0)

    def images(n):
        return TensorDataset(torch.rand(n, 3, 32, 32, generator=random), torch.arange(n) % 3)

    return perada.FederatedData([images(6), images(4)], [images(3)] * 2 if test else [], num_classes=3)


def test_batch_norm_in_the_adapter():
    assert_rejected(
        r"'.*' and \d+ more are trained BatchNorm layers.* norm='group'",
        net="test_resnet",
        data=coloured(),
        adapter="residual",
        pretrained=False,
        clients_per_round=2,
        adapter_options={"norm": "batch"},
    )


def test_batch_norm_of_ones_own_network():
    assert_rejected(r"'norm' and 0 more .*BatchNorm", net=network("net"))


class ByHand(nn.Module):
    """Normalises over the batch without a BatchNorm that anyone could see."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(36, 3)

    def forward(self, x):
        x = x.flatten(1)
        return self.fc((x - x.mean(0)) / (x.std(0, correction=0) + 1e-3))


def test_a_network_that_normalises_over_the_batch_by_hand():
    assert_rejected("output in training depends on the other images of its batch", net=ByHand().double())


def test_frozen_batch_norm_is_no_hindrance():
    run = train(
        WITHOUT_KD,
        PRIVATE,
        rounds=1,
        net="test_resnet",
        data=coloured(),
        adapter="head",
        pretrained=False,
        clients_per_round=2,
    )
    assert len(run.metrics["rounds"]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weighting": "samples"}, r"weighting='samples'.*'uniform'"),
        ({"clip_norm": 1.0}, "clip_norm=1.0 .* leave clip_norm out: privacy.max_norm"),
        ({"algorithm": FedEnsemble(modes=2, strata=2, assignment="loss")}, "FedEnsemble compares models .*permutation"),
        ({"algorithm": FedEnsemble(modes=2, strata=2, keeps="best")}, "FedEnsemble compares models .*keeps='ensemble'"),
        ({"engine": "loop", "privacy": PRIVATE | {"engine": "folded"}}, "requires a folded training engine"),
    ],
)
def test_options_that_leak_or_cannot_run(options, message):
    assert_rejected(message, **options)


@pytest.mark.parametrize("level", ["privacy", "client_privacy"])
def test_texts_are_rejected(level):
    random = torch.Generator().manual_seed(0)
    lines = [TensorDataset(torch.randint(80, (n, 80), generator=random), torch.arange(n) % 80) for n in (6, 4)]
    data = perada.FederatedData(lines, [], num_classes=80)
    chosen = {"privacy": None, "client_privacy": None, level: PRIVATE}
    assert_rejected(
        f"^{level}: texts are not supported",
        net="char_lstm_8",
        pretrained=False,
        data=data,
        clients_per_round=2,
        **chosen,
    )


@pytest.mark.parametrize("level", ["privacy", "client_privacy"])
def test_loss_scaling_is_rejected(level):
    chosen = {"privacy": None, "client_privacy": None, level: PRIVATE}
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    assert_rejected(f"^{level}: precision='16-mixed' is not supported: the loss scale", plugins=[plugin], **chosen)


@pytest.mark.parametrize("level", ["privacy", "client_privacy"])
@pytest.mark.parametrize(
    "callback",
    [
        lambda folder: ModelCheckpoint(folder, monitor="personal/local_test", mode="max"),
        lambda folder: ModelCheckpoint(folder, monitor="train/local_loss"),
        lambda folder: EarlyStopping("global/global_test", mode="max"),
        lambda folder: EarlyStopping("theory/personal_distance"),
        lambda folder: EarlyStopping("theory/global_gradient"),
        lambda folder: EarlyStopping("a metric of one's own"),
        # Names that begin, or end, like those of metrics that do not depend on images.
        lambda folder: EarlyStopping("epoch_accuracy"),
        lambda folder: EarlyStopping("round/score"),
        lambda folder: EarlyStopping("step_loss"),
        lambda folder: EarlyStopping("server/accuracy"),
        lambda folder: EarlyStopping("privacy/epsilon_max_accuracy"),
        lambda folder: ModelCheckpoint(folder, monitor="comm/up_mb_loss"),
    ],
)
def test_choosing_by_scores_on_clients_images(tmp_path, callback, level):
    chosen = {"privacy": None, "client_privacy": None, level: {"noise_multiplier": 8.0}}
    options = {"callbacks": [callback(tmp_path)], "enable_checkpointing": True}
    assert_rejected(f"^{level}: .* selects by .*, which may depend on clients' private images", **chosen, **options)


def test_an_error_of_both_levels_names_both_options():
    data = perada.FederatedDataModule(task(), batch_size=4, client_validation=0.4, evaluate_on="validation")
    assert_rejected("^privacy and client_privacy: evaluate_on='validation'", data=data, client_privacy=PRIVATE)


@pytest.mark.parametrize("level", ["privacy", "client_privacy"])
def test_evaluation_on_images_held_out_of_the_private_ones(level):
    data = perada.FederatedDataModule(task(), batch_size=4, client_validation=0.4, evaluate_on="validation")
    chosen = {"privacy": None, "client_privacy": None, level: {"noise_multiplier": 8.0}}
    assert_rejected(f"^{level}: evaluate_on='validation' scores models on held-out private images", data=data, **chosen)


@pytest.mark.parametrize("level", ["privacy", "client_privacy"])
def test_a_public_set_that_holds_a_private_image(level):
    private = task()
    public = torch.cat([private.public[:][0], private.train[2][5][0].unsqueeze(0)])
    data = perada.FederatedData(private.train, public=TensorDataset(public), num_classes=3)
    chosen = {"privacy": None, "client_privacy": None, level: PRIVATE}
    message = f"^{level}: image 5 of client 2 is also image 7 of the public set"
    if level == "privacy":
        assert_rejected(message, PerAda(), **chosen, data=data, distill_steps=2)
        assert_rejected(message, server_rule=FLTrust(labels=False), **chosen, data=data)
    else:  # which cannot be had with distillation at all
        assert_rejected("does not support PerAda with distillation", PerAda(), **chosen, data=data, distill_steps=2)
    assert_rejected(message, **chosen, data=data)  # the server has it, whatever it does with it
    train(WITHOUT_KD, PRIVATE, rounds=1, data=perada.FederatedData(private.train, public=private.public, num_classes=3))


@pytest.mark.parametrize("level", ["privacy", "client_privacy"])
def test_a_labelled_server_set_that_holds_a_private_image(level):
    """FLTrust's root set, for one, is a model trained on it."""
    private = task()
    data = perada.FederatedData(private.train, server_validation=private.train[1], num_classes=3)
    chosen = {"privacy": None, "client_privacy": None, level: PRIVATE}
    message = f"^{level}: image 0 of client 1 is also image 0 of the server's validation set"
    assert_rejected(message, **chosen, data=data)
    if level == "privacy":
        assert_rejected(message, server_rule=FLTrust(labels=True), **chosen, data=data)


@pytest.mark.parametrize("option", ["public_fraction", "validation_fraction"])
@pytest.mark.parametrize("level", ["privacy", "client_privacy"])
def test_a_share_of_clients_images_for_the_server(level, option):
    """Whatever the server does with it: here nothing."""
    data = perada.FederatedDataModule(
        dataset=Digits(), partition=IID(2), train_limit=40, test_limit=8, batch_size=4, image_size=16, **{option: 0.2}
    )
    chosen = {"privacy": None, "client_privacy": None, level: PRIVATE}
    options = {"net": "test_resnet", "adapter": "head", "pretrained": False, "clients_per_round": 2}
    assert_rejected(
        rf"{option}=0\.2 cannot be used in a private run: .* of the clients' own images", **chosen, data=data, **options
    )


class Wrapper(Dataset):
    """A dataset of somebody's own around another one."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __getitem__(self, index):
        return self.dataset[index]

    def __len__(self):
        return len(self.dataset)


@pytest.mark.parametrize("level", ["privacy", "client_privacy"])
def test_weights_that_were_trained_on_the_clients_images(level):
    data = perada.FederatedDataModule(
        dataset=Digits(), partition=IID(2), train_limit=40, test_limit=8, batch_size=4, image_size=32
    )
    chosen = {"privacy": None, "client_privacy": None, level: PRIVATE}
    options = {
        "net": "test_resnet",
        "adapter": "head",
        "clients_per_round": 2,
        "pretrained": "perada:digits_test_resnet",
    }
    assert_rejected(r"pretrained='perada:digits_test_resnet' .*Digits", **chosen, data=data, **options)
    digits = Digits().with_split(True)
    for client in (digits, ConcatDataset([digits, digits]), Wrapper(Subset(digits, range(9)))):
        given = perada.FederatedData([client] * 2, num_classes=10)
        assert_rejected(r"was trained on the images of Digits", **chosen, data=given, image_size=32, **options)


def test_a_client_joins_by_no_weights_that_were_trained_on_its_images():
    random = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8, generator=random)
    others = perada.FederatedData([TensorDataset(x, torch.arange(8))] * 2, num_classes=10)
    run = perada.finetune(
        "test_resnet", others, pretrained="perada:digits_test_resnet", adapter="head", algorithm="ditto", rounds=1,
        local_steps=1, batch_size=4, privacy=PRIVATE, accelerator="cpu", enable_progress_bar=False, logger=False,
    )  # fmt: skip
    newcomers = perada.FederatedData([Subset(Digits().with_split(True), range(20))], num_classes=10)
    with pytest.raises(ValueError, match="Digits"):
        perada.personalize(run, newcomers, "new", rounds=1, accelerator="cpu")


@pytest.mark.filterwarnings("ignore:the floating-point images of:UserWarning")
def test_images_whose_gradients_are_not_finite_are_rejected_in_one_line():
    data = copy.deepcopy(task())  # the task is shared by all tests
    for part in data.train:
        part.tensors[0].fill_(1e308)
    assert_rejected("privacy: the gradients of a client's first image are not finite", data=data)


@pytest.mark.parametrize("level", ["privacy", "client_privacy"])
def test_ending_by_the_number_of_clients_that_failed(level):
    chosen = {"privacy": None, "client_privacy": None, level: PRIVATE}
    assert_rejected(r"max_failures=1.*client_privacy", max_failures=1, **chosen)


def test_personal_models_in_a_log_beside_the_ledger_of_the_server():
    message = (
        "personal_distance cannot be measured: it would reveal personal models, which the server's ledger does not"
    )
    assert_rejected(message, diagnostics=["personal_distance"])


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": PerAda(), "distill_steps": 2}, "the teachers are single clients' updates"),
        ({"server_rule": "median"}, "not a function of the clients' mean"),
        ({"weighting": "samples"}, "client_privacy does not support weighting='samples'"),
        ({"algorithm": "standalone"}, "its clients send nothing"),
        ({"algorithm": FedEnsemble(modes=2, strata=2)}, r"FedEnsemble\(modes=2\)"),
    ],
)
def test_what_makes_more_of_updates_than_their_mean(options, message):
    assert_rejected(message, privacy=None, client_privacy={"noise_multiplier": 8.0}, **options)


class Reads(Algorithm):
    """Looks at the logits themselves."""

    def client_step(self, step):
        step.descend("local", step.logits("local").square().mean((1, 2)))


class Counts(Algorithm):
    """Looks at the labels."""

    def client_step(self, step):
        step.descend("local", step.loss("local") * step.class_counts(3)[:, 0])


class Labels(Algorithm):
    """Looks at the labels of the step."""

    def client_step(self, step):
        step.descend("local", step.loss("local") * step.labels.float().mean(1))


class Growing(Algorithm):
    """Asks for one gradient in the first round, and for another in the second."""

    def client_step(self, step):
        for _ in range(1 + (step.round > 0)):
            step.descend("local", step.loss("local"))


class Other(PerAda):
    """Turns to a stream in the second round that it left alone in the first."""

    def client_step(self, step):
        step.descend("local", step.loss("local"))
        if step.round:
            step.descend("personal", step.loss("personal"))


class Fewer(Algorithm):
    """Asks for two gradients in the first round, and for one in the second: the ledgers count two."""

    def client_step(self, step):
        for _ in range(2 - (step.round > 0)):
            step.descend("local", step.loss("local"))


def test_an_algorithm_that_reads_logits():
    for one in (Reads(), Counts(), Labels(), Moon(), FedROD()):
        assert_rejected(rf"privacy does not support {type(one).__name__}: .*step\.logits.* use step\.loss", one)


class Later(Algorithm):
    """Looks at the outputs in the second round, which no rehearsal sees."""

    def client_step(self, step):
        if step.round:
            step.outputs("local")
        step.descend("local", step.loss("local"))


def test_outputs_are_rejected_in_the_step_too():
    assert_rejected("privacy does not support Later", Later(), **{"local_steps": 2, "local_epochs": None, "steps": 3})


def test_gradients_that_the_ledgers_do_not_count_are_not_given():
    """The rehearsal sees the first round only, so that this comes up in the step that asks for more: the third."""
    options = {"local_steps": 2, "local_epochs": None, "steps": 3}
    assert_rejected("asked for more gradients of 'local' than in the dry run", Growing(), kind=RuntimeError, **options)
    assert_rejected("personal", Other(distill=False), kind=(RuntimeError, KeyError), **options)


def test_fewer_gradients_than_rehearsed_are_counted_as_rehearsed():
    fewer = Fewer()
    twice = Growing()
    for algorithm, rounds in ((fewer, 2), (twice, 1)):
        assert len(train(algorithm, PRIVATE, rounds=rounds).metrics["rounds"]) == rounds
    spent = train(fewer, PRIVATE | {"accountant": "rdp"}, rounds=2).metrics["clients"]["privacy/server_epsilon"]
    plain = train(FedAvg(), PRIVATE, rounds=2).metrics["clients"]["privacy/server_epsilon"]
    assert all(more > less for more, less in zip(spent, plain, strict=True))
    assert len(spent) == len(SIZES)


@pytest.mark.parametrize("delta", [1 / max(SIZES), 0.1, 0.9])
def test_a_delta_that_allows_to_show_an_image_is_rejected(delta):
    """The limit is the largest client's: a δ that fits the others would allow to publish one of its images."""
    largest = SIZES.index(max(SIZES))
    message = (
        rf"privacy: delta={delta} must be below 1 / {max(SIZES)}, the number of training images of client {largest}"
    )
    for privacy in ({"noise_multiplier": 1.0, "delta": delta}, {"target_epsilon": 3.0, "delta": delta}):
        assert_rejected(message, "fedavg", privacy)
    train("fedavg", {"noise_multiplier": 1.0, "delta": 0.99 / max(SIZES)}, rounds=1)


@pytest.mark.parametrize("delta", [1 / len(SIZES), 0.5])
def test_a_delta_that_allows_to_show_a_client_is_rejected(delta):
    level = {"noise_multiplier": 1.0, "delta": delta}
    message = rf"client_privacy: delta={delta} must be below 1 / {len(SIZES)}, the number of clients"
    assert_rejected(message, "fedavg", None, client_privacy=level)
    train("fedavg", None, rounds=1, client_privacy=level | {"delta": 0.99 / len(SIZES)})


@pytest.mark.every_value
@pytest.mark.parametrize("section", ["privacy", "client_privacy"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_epsilon": 1000}, r"target_epsilon must be a finite number > 0 and <= 50 or None, got 1000"),
        ({"noise_multiplier": 1.0, "accountant": "gdp"}, r"accountant must be one of 'rdp', 'prv', got 'gdp'"),
        (
            {"noise_multiplier": 1.0, "delta": 1.0},
            r"delta must be a finite number > 0 and < 1, got 1\.0",
        ),
        ({"noise_multiplier": 1.0, "delta": 1.5}, r"delta must be .*, got 1\.5"),
    ],
)
def test_accounting_that_means_nothing(section, options, message):
    assert_rejected(f"{section}: {message}", "fedavg", **({"privacy": None} | {section: options}))


class Beside(nn.Module):
    """Uses a layer's weight without calling the layer."""

    def __init__(self):
        super().__init__()
        self.inner, self.fc = nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.fc(nn.functional.linear(x.mean((2, 3)), self.inner.weight, self.inner.bias).tanh())


class Counting(nn.Module):
    """Keeps a mean of the images that it saw in training, by a layer that nothing trains."""

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x):
            if self.training:
                self.seen.add_(x.detach().mean(0))
            return x

    def __init__(self):
        super().__init__()
        self.mean, self.fc = self.Mean(), nn.Linear(3, 3)

    def forward(self, x):
        return self.fc(self.mean(x.mean((2, 3))))


class Attends(nn.Module):
    """torch's own attention, whose output is a tuple."""

    def __init__(self):
        super().__init__()
        self.attention, self.fc = nn.MultiheadAttention(4, 1, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        x = nn.functional.adaptive_avg_pool2d(x, 2).flatten(2)
        return self.fc(self.attention(x, x, x)[0].mean(1))


def test_a_layer_that_is_not_called():
    message = r"the per-image gradients of 'inner\.weight' do not add up"
    assert_rejected(message, net=Beside(), data=coloured(), adapter="full", clients_per_round=2, engine="loop")


@pytest.mark.parametrize("engine", ["loop", "folded"])
def test_a_network_that_remembers_images(engine):
    message = "the network retains state from the images that it sees in training"
    assert_rejected(message, net=Counting(), data=coloured(), adapter="full", clients_per_round=2, engine=engine)


@pytest.mark.filterwarnings("ignore:engine='auto' falls back to the per-client loop")
def test_attention_that_opacus_cannot_hook():
    assert_rejected("Opacus's hooks fail", net=Attends(), data=coloured(), adapter="full", clients_per_round=2)


@pytest.mark.parametrize("adapter", [peft.LoraConfig(use_dora=True), peft.LoHaConfig()])
@pytest.mark.filterwarnings("ignore:engine='auto' falls back to the per-client loop")
def test_layers_that_opacus_cannot_hook(adapter):
    options = {"pretrained": False, "image_size": 32, "clients_per_round": 2}
    assert_rejected("Opacus's hooks fail", net="test_vit", data=coloured(), adapter=adapter, **options)


def test_opacus_does_not_know_what_the_fold_knows():
    options = {"pretrained": False, "image_size": 32, "clients_per_round": 2, "engine": "loop"}
    assert_rejected("Opacus's hooks fail", net="test_vit", data=coloured(), adapter="ia3", **options)


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_multiplier": "1"}, r"privacy: noise_multiplier .*got '1'"),
        ({"noise_multiplier": True}, "noise_multiplier must be .*, got True"),
        (
            {"noise_multiplier": 1.0, "delta": "1e-5"},
            "privacy: delta must be a finite number > 0 and < 1, got '1e-5'",
        ),
        (
            {"noise_multiplier": 1.0, "secure_rng": "no"},
            "privacy: secure_rng must be one of True, False, got 'no'",
        ),
        ({"noise_multiplier": 1.0, "physical_batch_size": True}, "physical_batch_size must be .*, got True"),
        ({"noise_multiplier": 1.0, "target_epsilon": 3.0}, "set exactly one of them"),
        (
            {"noise_multiplier": 1e200},
            r"privacy: noise_multiplier must be a finite number >= 0 and <= .*, got 1e\+200",
        ),
        ({"noise_multiplier": 1e99, "max_norm": 1e300}, r"privacy: max_norm must be .*, got 1e\+300"),
    ],
)
def test_wrong_types(options, message):
    assert_rejected(message, privacy=options)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clipping": "adaptve"}, r"client_privacy: clipping .*got 'adaptve'"),
        ({"quantile": 1.5}, "client_privacy: quantile must be a finite number >= 0 and <= 1, got 1.5"),
        ({"count_noise": 0.0}, "client_privacy: count_noise must be .*, got 0.0"),
        ({"clip_lr": -0.2}, "client_privacy: clip_lr must be .*, got -0.2"),
        ({"accountant": "zcdp"}, "client_privacy: accountant must be one of .*, got 'zcdp'"),
        ({"delta": 0.0}, "client_privacy: delta must be a finite number > 0 and < 1, got 0.0"),
    ],
)
def test_wrong_options_of_whole_clients(options, message):
    assert_rejected(message, client_privacy={"noise_multiplier": 1.0} | options)


def test_what_is_sent_does_not_depend_on_what_is_not():
    """A personal adapter that diverges does not keep its client from being averaged."""
    states = []
    for rate in (0.1, 3e38):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of the clients who diverged
            run = train(WITHOUT_KD, {"noise_multiplier": 1.0, "delta": 1e-3}, lr_personal=rate)
        states.append(run.state("global"))
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key])


def test_a_validation_set_of_the_server_with_a_private_image():
    data = coloured(public=True)
    data.public, data.server_validation = TensorDataset(torch.zeros(5, 3, 32, 32)), data.train[0]
    options = {"adapter": "lora", "pretrained": False, "image_size": 32, "clients_per_round": 2}
    distilling = {"distill_steps": 2, "distill_validate_every": 1}
    message = "image 0 of client 0 is also image 0 of the server's validation set"
    assert_rejected(message, PerAda(), net="test_vit", data=data, **options, **distilling)
