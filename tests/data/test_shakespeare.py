# SPDX-License-Identifier: Apache-2.0
"""Shakespeare by speaking role: LEAF's files, the way of a token, and rounds on a miniature against a plain loop."""

import json
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call
from torch.utils.data import TensorDataset

import perada
from perada.cli import main
from perada.data import ByDomain, FederatedDataModule, Shakespeare
from perada.data.sets.published import CHARACTERS
from tests.options import sections

TEXT = "Now is the winter of our discontent made glorious summer by this sun of York;\nAnd all the clouds that lour'd "
TEXT += "upon our house\nIn the deep bosom of the ocean buried. (1594) [Enter CLARENCE, guarded]"
SIZES = {"RICHARD": (9, 3), "CLARENCE": (5, 2), "LADY_ANNE": (7, 0)}


def entry(start, size):
    """Sequences as LEAF cuts them: at every character, with the next one to be told."""
    places = range(start, start + size)
    return {"x": [TEXT[place : place + 80] for place in places], "y": [TEXT[place + 80] for place in places]}


def write(folder, split, users, name="all_data_niid_0_keep_0_train_9.json"):
    path = folder / split / name
    path.parent.mkdir(parents=True, exist_ok=True)
    sizes = [len(data["y"]) for data in users.values()]
    path.write_text(json.dumps({"users": list(users), "num_samples": sizes, "user_data": users}))
    return path


@pytest.fixture
def root(tmp_path):
    """LEAF's folder with three roles, one of which has nothing to say in the test split."""
    folder = tmp_path / "shakespeare" / "data"
    for start, (role, (train, test)) in enumerate(SIZES.items()):
        write(folder, "train", {role: entry(20 * start, train)}, f"part_{start}.json")
        if test:
            write(folder, "test", {role: entry(20 * start + train, test)}, f"part_{start}.json")
    return tmp_path / "shakespeare"


def test_the_vocabulary_is_leafs():
    assert len(CHARACTERS) == len(set(CHARACTERS)) == Shakespeare.num_classes == 80
    assert list(CHARACTERS) == sorted(CHARACTERS)


def test_sequences_are_read_as_they_stand(root):
    train = Shakespeare(str(root))
    test = Shakespeare(str(root / "data")).with_split(False)
    assert (train.images.shape, train.images.dtype, train.labels.dtype) == ((21, 80), torch.int64, torch.int64)
    assert len(test) == 5
    assert dict(zip(*np.unique(train.columns["client"], return_counts=True), strict=True)) == {
        role: sizes[0] for role, sizes in SIZES.items()
    }
    for row, place in ((0, 0), (8, 8), (9, 20), (20, 46)):  # files in order, and sequences in theirs
        assert "".join(CHARACTERS[token] for token in train.images[row]) == TEXT[place : place + 80]
        assert CHARACTERS[train.labels[row]] == TEXT[place + 80]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda x: x.update(num_samples=[8]),
            "'RICHARD' does not have 8 sequences of 80 characters",
        ),
        (lambda x: x["user_data"]["RICHARD"]["x"].__setitem__(0, "short"), "'RICHARD' does not have 9 sequences of 80"),
        (lambda x: x["user_data"]["RICHARD"]["y"].__setitem__(0, "ab"), "'RICHARD' does not have 9 sequences of 80"),
        (
            lambda x: x["user_data"]["RICHARD"]["y"].__setitem__(0, 7),
            "cannot be read (object of type 'int' has no len()",
        ),
        (
            lambda x: x["user_data"]["RICHARD"]["y"].__setitem__(0, "é"),
            "cannot be read (the character 'é' is not one of LEAF's 80",
        ),
        (lambda x: x["user_data"]["RICHARD"].update(x=None), "cannot be read (object of type 'NoneType' has no len()"),
        (
            lambda x: x.pop("user_data"),
            "cannot be read ('user_data'), expected a file of LEAF's with users, num_samples and user_data: run",
        ),
        (lambda x: x.update(users=["RICHARD", "YORK"]), "cannot be read (zip()"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(root, change, message):
    path = root / "data" / "train" / "part_0.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        _ = Shakespeare(str(root)).images
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_plain_text_is_read_by_role(tmp_path):
    speeches = [("RICHARD", TEXT[:150]), ("LADY ANNE", TEXT[30:] * 4), ("RICHARD", TEXT[10:]), ("ECHO", "Ay.")]
    path = tmp_path / "plays.txt"
    path.write_text("ACT ONE\n\n" + "\n\n".join(f"{role}:\n{speech}€" for role, speech in speeches) + "\n")
    said = {"RICHARD": f"{TEXT[:150]}\n{TEXT[10:]}", "LADY ANNE": TEXT[30:] * 4}
    for train in (True, False):
        expected = set()
        for role, text in said.items():
            cut = int(0.8 * len(text))
            part = text[:cut] if train else text[cut:]
            expected |= {(role, part[i : i + 80], part[i + 80]) for i in range(len(part) - 80)}
        split = Shakespeare(str(path), train=train)
        rows = zip(split.columns["client"].tolist(), split.images.tolist(), split.labels.tolist(), strict=True)
        actual = [(role, "".join(CHARACTERS[token] for token in x), CHARACTERS[y]) for role, x, y in rows]
        assert set(actual) == expected
        assert len(actual) == sum(
            max(0, len(part) - 80)
            for text in said.values()
            for part in [text[: int(0.8 * len(text))] if train else text[int(0.8 * len(text)) :]]
        )
    data = FederatedDataModule(dataset=Shakespeare(str(path)), partition=ByDomain("client"))
    data.setup()
    assert data.num_clients == 2
    path.write_text("No speech at all.")
    with pytest.raises(ValueError, match=r"plays\.txt'.*80"):
        _ = Shakespeare(str(path)).images


def test_a_role_that_says_nothing_is_left_out(root):
    write(root / "data", "train", {"GHOST": {"x": [], "y": []}}, "part_9.json")
    assert len(Shakespeare(str(root))) == 21


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"train/\*\.json.*root"):
        _ = Shakespeare(str(tmp_path)).images


def make_datamodule(root, **options):
    return FederatedDataModule(
        dataset=Shakespeare(str(root)), partition=ByDomain("client"), **{"batch_size": "full"} | options
    )


def test_every_role_is_a_client_and_tokens_reach_the_model_as_they_are(root):
    data = make_datamodule(root, batch_size=4)
    data.setup()
    assert data.train_sizes == (5, 7, 9)  # in the order of the names
    assert [len(rows) for rows in data.partition_dict()["test"]] == [2, 0, 3]
    images = Shakespeare(str(root)).images
    for batch in data.cohort_loader(data.plan(0)):
        x = data.prepare(batch).x
        assert x.dtype == torch.int64
        known = {tuple(row) for row in images.tolist()}
        real = [row for rows, count in zip(x, batch.counts, strict=True) for row in rows[:count].tolist()]
        assert all(tuple(row) in known for row in real)


OPTIONS = {
    "backbone": "char_lstm_8",
    "pretrained": False,
    "adapter": "full",
    "rounds": 2,
    "local_steps": 1,
    "check_val_every_n_epoch": 2,
    "lr_personal": 0.5,
    "lr_local": 0.5,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "accelerator": "cpu",
}


def finetune(data, algorithm, **options):
    arguments = OPTIONS | options
    return perada.finetune(arguments.pop("backbone"), data, **sections(algorithm=algorithm, **arguments))


def clients_of(root):
    train = Shakespeare(str(root))
    roles = train.columns["client"]
    rows = [np.flatnonzero(roles == role) for role in sorted(SIZES)]
    return [(train.images[client_rows], train.labels[client_rows]) for client_rows in rows]


def descend(model, state, x, y, anchor=None):
    """A step of gradient descent on all of a client's sequences."""
    leaves = {key: value.detach().clone().requires_grad_() for key, value in state.items()}
    loss = F.cross_entropy(functional_call(model, leaves, (x,)), y)
    if anchor is not None:
        loss = loss + 0.5 * sum(((leaves[key] - anchor[key]) ** 2).sum() for key in leaves)
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {key: state[key] - 0.5 * gradient for key, gradient in zip(leaves, gradients, strict=True)}


def average(states):
    return {key: sum(state[key] for state in states) / len(states) for key in states[0]}


def assert_close(state, expected, start):
    for key, value in expected.items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5)
    assert max(float((state[key] - start[key]).abs().max()) for key in state) > 0.01


@pytest.mark.parametrize(
    ("algorithm", "engine"),
    [
        ("perada_no_kd", "folded"),
        pytest.param("fedavg", "loop", marks=pytest.mark.slow),
        pytest.param("fedavg", "folded", marks=pytest.mark.slow),
        pytest.param("perada_no_kd", "loop", marks=pytest.mark.slow),
    ],
)
def test_two_rounds_are_those_of_a_plain_loop(root, algorithm, engine):
    run = finetune(make_datamodule(root), algorithm, engine=engine)
    start = finetune(make_datamodule(root), algorithm, rounds=0)
    model = start.global_model()
    clients = clients_of(root)
    w = start.state("global")
    personal = [w] * 3
    for _ in range(2):
        personal = [descend(model, v, *own, anchor=w) for v, own in zip(personal, clients, strict=True)]
        w = average([descend(model, w, *own) for own in clients])
    assert_close(run.state("global"), w, start.state("global"))
    if algorithm != "fedavg":
        for client, v in enumerate(personal):
            assert_close(run.state("personal", client), v, start.state("global"))
    tests = Shakespeare(str(root)).with_split(False)
    right = functional_call(model, w, (tests.images,)).argmax(1) == tests.labels
    assert run.metrics["rounds"][-1]["global/global_test"] == pytest.approx(float(right.float().mean()))


@pytest.mark.slow
def test_two_rounds_of_an_ensemble_are_those_of_a_plain_loop(root):
    """One stratum: all clients train mode 0 in one round of the age, and mode 1 in the other."""
    options = {"algorithm_options": {"modes": 2, "strata": 1}}
    run = finetune(make_datamodule(root), "fed_ensemble", **options)
    start = finetune(make_datamodule(root), "fed_ensemble", rounds=0, **options)
    clients = clients_of(root)
    first = start.states("global")
    model = start.global_model().members[0]
    for state, client_batches in zip(run.states("global"), first, strict=True):
        assert_close(state, average([descend(model, client_batches, *client) for client in clients]), client_batches)
    assert not torch.equal(first[0]["embedding.weight"], first[1]["embedding.weight"])
    tests = Shakespeare(str(root)).with_split(False)
    logits = sum(functional_call(model, state, (tests.images,)) for state in run.states("global")) / 2
    accuracy = float((logits.argmax(1) == tests.labels).float().mean())
    assert run.metrics["rounds"][-1]["global/global_test"] == pytest.approx(accuracy)


@pytest.mark.slow
def test_perada_distils_on_public_sequences_and_measures_them(root):
    data = make_datamodule(root, public_fraction=0.2, batch_size=4)
    (result,) = finetune(
        data, "perada", rounds=1, distill_steps=10, distill_lr=3e-5, distill_batch_size="full", diagnostics=True
    ).metrics["rounds"]
    assert data.public_size == 4
    assert 0 < result["theory/distilled_distance"] < result["theory/averaged_distance"]


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["head", "lora"])
def test_adapters_are_trained_and_saved(root, tmp_path, adapter):
    run = finetune(make_datamodule(root), "perada_no_kd", adapter=adapter)
    loaded = perada.Run.load(run.save(tmp_path / "run"))
    x = Shakespeare(str(root)).images
    for client in range(3):
        assert torch.equal(loaded.personal(client)(x), run.personal(client)(x))
    assert not torch.equal(run.personal(0)(x), run.personal(1)(x))


@pytest.mark.slow
def test_features_of_the_frozen_part_give_the_same_run(root):
    kept, anew = (finetune(make_datamodule(root), "fedavg", adapter="head", cache_features=on) for on in (True, False))
    for key, value in kept.state("global").items():
        torch.testing.assert_close(value, anew.state("global")[key], rtol=1e-5, atol=1e-6)
    assert kept.metrics["rounds"][-1]["train/local_loss"] == pytest.approx(
        anew.metrics["rounds"][-1]["train/local_loss"], rel=1e-5
    )


def single(x, size=4):
    return perada.FederatedData([TensorDataset(x, torch.arange(size) % 2)])


@pytest.mark.parametrize(
    ("x", "backbone", "error", "message"),
    [
        (
            torch.zeros(4, 3, 8, 8).long(),
            "char_lstm_8",
            TypeError,
            "tokens (L,), got shape (3, 8, 8)",
        ),
        (torch.zeros(4, 80, dtype=torch.int32), "char_lstm_8", TypeError, "images are int32: use uint8"),
        (torch.full((4, 80), 80), "char_lstm_8", ValueError, "of shape (80,) and type int64 do not fit backbone"),
        (
            torch.zeros(4, 80).long().index_fill(0, torch.tensor([3]), 80),  # not in the first text
            "char_lstm_8",
            ValueError,
            "pass texts of the length that it expects, with tokens from its vocabulary",
        ),
        (torch.rand(4, 80), "char_lstm_8", ValueError, "type float32 do not fit backbone 'char_lstm_8'"),
        (torch.zeros(4, 80, dtype=torch.int64), "test_resnet", ValueError, "do not fit backbone 'test_resnet'"),
    ],
)
def test_tokens_and_images_in_the_wrong_place_are_rejected_at_setup(x, backbone, error, message):
    with pytest.raises(error, match=re.escape(message)) as caught:
        finetune(single(x), "fedavg", backbone=backbone, rounds=1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("privacy", ["privacy", "client_privacy"])
def test_texts_are_rejected_where_training_is_private(root, privacy):
    with pytest.raises(ValueError, match=rf"^{privacy}: texts"):
        finetune(make_datamodule(root), "fedavg", **{privacy: {"noise_multiplier": 1.0}})


def test_texts_are_not_mirrored(root):
    with pytest.raises(ValueError, match=r"\(80,\).*crop_padding, flip, mixup and cutmix"):
        finetune(make_datamodule(root, flip=True), "fedavg")


SMALL = ["--trainer.fast_dev_run=true", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
SMALL += ["--model.backbone=char_lstm_8", "--data.batch_size=4", "--federated.clients_per_round=2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        "perada",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "fedavg",
                "fed_ensemble",
                "perada_no_kd",
                "ditto",
                "fedprox",
                "feddf",
                "fedrep",
                "standalone",
                "fedavg_ft",
            )
        ),
    ],
)
def test_the_recipe_goes_with_methods(root, method, capsys):
    distils = ["--distillation.steps=1"] if method in ("perada", "feddf") else []
    main(["fit", "--config", f"shakespeare/{method}", f"--data.dataset.root={root}", *SMALL, *distils])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line.split("|")[1].strip() for line in lines] == ["client", *sorted(SIZES), "mean ± std"]
