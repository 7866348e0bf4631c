# SPDX-License-Identifier: Apache-2.0
"""Predictions of a run with both models of a client: as scored, after saving, from a checkpoint, by the program."""

import csv

import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

import perada
from perada.cli.main import main
from perada.core.checks import OptionError
from perada.results.clients import forget
from perada.results.predictors import BothModelsPredictor
from perada.tasks import Classification
from tests.federation.test_both_models import fitted, is_typical_by_hand, predicted_by_hand, share_by_hand, shifted


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """A run, with its folder in ``run.folder``."""
    folder = tmp_path_factory.mktemp("fit")
    trained_run = fitted(
        tiny, shifted(tiny), "ditto", rounds=12, clients_per_round=None, default_root_dir=folder, logger=True
    )
    trained_run.folder = folder / "lightning_logs" / "version_0"
    return trained_run


def test_predictions_are_those_that_were_scored(run, tiny):
    data = shifted(tiny)
    for client, part in enumerate(data.test):
        images, labels = part.tensors
        training_images, training_labels = data.train[client].tensors
        found = run.predict(images, client)
        is_typical = is_typical_by_hand(training_images, images)
        share = share_by_hand(run, training_images, training_labels)
        assert found.typical.tolist() == is_typical.tolist()
        assert found.answered_by == ["both" if typical else "global" for typical in is_typical.tolist()]
        assert (
            found.labels.tolist() == predicted_by_hand(run, client, is_typical, share, images, training_labels).tolist()
        )
        accuracy = float((found.labels == labels).float().mean())
        assert accuracy == pytest.approx(run.metrics["clients"]["both/local_test"][client], abs=1e-6)


def test_each_model_can_be_chosen(run, tiny):
    images, _ = shifted(tiny).test[1].tensors
    with torch.no_grad():
        personal = run.personal(1)(images).softmax(-1)
        shared = run.global_model()(images).softmax(-1)
    torch.testing.assert_close(run.predict(images, 1, prediction="personal").probabilities, personal)
    torch.testing.assert_close(run.predict(images, 1, prediction="global").probabilities, shared)
    torch.testing.assert_close(run.predict(images).probabilities, shared)
    assert run.predict(images, 1, prediction="personal").typical is None
    with pytest.raises(ValueError, match="one model"):
        assert run.predict(images).answered_by


def test_a_caller_may_be_in_inference_mode(tmp_path):
    """Networks can be neither changed nor searched for frozen layers there."""
    random = torch.Generator().manual_seed(0)
    clients = []
    for brightness in (0.0, 4.0):
        images = torch.randn(12, 3, 16, 16, generator=random) + brightness
        clients.append(TensorDataset(images, torch.arange(12) % 2))
    run = perada.finetune(
        "test_resnet",
        perada.FederatedData(clients, clients),
        pretrained=False,
        adapter="head",
        algorithm="ditto",
        rounds=1,
        evaluation={"prediction": "both"},
    )
    run.save(tmp_path / "saved")
    images = torch.cat([client.tensors[0] for client in clients])
    for prediction in ("both", "personal", "global"):
        outside = run.predict(images, 1, prediction=prediction)
        with torch.inference_mode():
            inside = run.predict(images, 1, prediction=prediction)
            loaded = perada.Run.load(tmp_path / "saved").predict(images, 1, prediction=prediction)
        torch.testing.assert_close(inside.probabilities, outside.probabilities, atol=0, rtol=0)
        torch.testing.assert_close(loaded.probabilities, outside.probabilities)
        if prediction == "both":
            assert inside.typical.tolist() == outside.typical.tolist() == loaded.typical.tolist()
            assert len(set(inside.typical.tolist())) == 2


@pytest.mark.parametrize("adapter", ["full", "head"])
def test_a_model_that_no_image_of_a_batch_needs_does_not_run(tiny, adapter):
    """Outputs of a broken model are NaN, and so would be what is computed with them."""
    data = shifted(tiny)
    run = fitted(tiny, data, "ditto", adapter=adapter)
    images = torch.cat([part.tensors[0] for part in data.test])
    is_typical = run.predict(images, 2, prediction="both").typical
    typical, foreign = images[is_typical], images[~is_typical]
    assert len(typical) > 3 and len(foreign) > 3
    states = {"personal": run.state("personal", 2), "global": run.state("global")}

    def predict(batch, personal_share, broken=None):
        used = dict(states)
        if broken is not None:
            used[broken] = {name: torch.full_like(tensor, torch.nan) for name, tensor in states[broken].items()}
        predictor = BothModelsPredictor(
            run._adapted.model,
            used["personal"],
            [used["global"]],
            run.state_of_both(2) | {"personal_share": torch.tensor(personal_share, dtype=torch.double)},
            Classification(),
            run.info["average"],
            images[0],
            torch.device("cpu"),
        )
        with torch.no_grad():
            return predictor(batch).logits.softmax(-1)

    with torch.no_grad():
        personal = run.personal(2)(images).softmax(-1)
        shared = run.global_model()(images).softmax(-1)
    torch.testing.assert_close(predict(typical, 1.0, broken="global"), personal[is_typical])
    torch.testing.assert_close(predict(foreign, 1.0, broken="personal"), shared[~is_typical])
    torch.testing.assert_close(predict(foreign, 0.5, broken="personal"), shared[~is_typical])
    torch.testing.assert_close(predict(images, 1.0), torch.where(is_typical[:, None], personal, shared))
    assert predict(images[:0], 1.0).shape == (0, 3)
    # Where both have a weight, both run.
    assert predict(typical, 0.5, broken="global").isnan().all()
    assert predict(typical, 0.5, broken="personal").isnan().all()


@pytest.mark.parametrize("prediction", ["personal", "both"])
def test_a_model_of_no_client_is_rejected(run, prediction):
    with pytest.raises(OptionError, match=rf"prediction='{prediction}'.*client=None"):
        run.predict(torch.zeros(1, 1, 8, 8), prediction=prediction)


@pytest.mark.parametrize("kind", ["saved", "exported", "checkpoint"])
def test_a_loaded_run_predicts_alike(run, tiny, tmp_path, kind):
    folder = run.folder
    if kind == "saved":
        folder = run.save(tmp_path / "run")
    elif kind == "exported":
        folder = run.export(tmp_path / "run")
    loaded = perada.Run.load(folder, backbone=tiny.net())
    images, _ = shifted(tiny).test[2].tensors
    for client in range(5):
        expected = run.predict(images, client)
        found = loaded.predict(images, client)
        assert torch.equal(found.probabilities, expected.probabilities)
        assert torch.equal(found.typical, expected.typical)


def test_an_exported_run_without_statistics_says_so(run, tiny, tmp_path):
    loaded = perada.Run.load(run.export(tmp_path / "run", prediction="personal"), backbone=tiny.net())
    images, _ = shifted(tiny).test[2].tensors
    with pytest.warns(UserWarning, match=r"client 2 .*personal"):
        found = loaded.predict(images, 2)
    assert torch.equal(found.probabilities, run.predict(images, 2, prediction="personal").probabilities)
    with pytest.raises(OptionError, match=r"statistics.*client 2"):
        loaded.predict(images, 2, prediction="both")


def test_a_forgotten_client_leaves_no_statistics(run, tiny, tmp_path):
    folder = run.save(tmp_path / "run")
    before = perada.Run.load(folder, backbone=tiny.net())
    statistics = before._state_of_both(3)["examples"].numpy().tobytes()
    assert any(statistics[:64] in path.read_bytes() for path in folder.glob("*.safetensors"))
    forget(folder, 3)
    assert not any(statistics[:64] in path.read_bytes() for path in folder.glob("*.safetensors"))
    images, _ = shifted(tiny).test[2].tensors
    after = perada.Run.load(folder, backbone=tiny.net())
    assert torch.equal(after.predict(images, 4).probabilities, run.predict(images, 4).probabilities)


def test_the_program_writes_which_images_are_typical(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    for number in range(4):
        Image.new("L", (8, 8), 60 * number).save(tmp_path / "images" / f"{number}.png")
    small = ["--trainer.max_epochs", "1", "--trainer.check_val_every_n_epoch", "1", "--data.train_limit", "120"]
    main(["fit", "--config", "digits", *small, "--evaluation.prediction", "both"])
    # It has 22 training images.
    main(["predict", "lightning_logs/version_0", "--images", "images", "--client", "13"])
    with (tmp_path / "predictions.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[-1] == "typical"
    # A blank page is no digit.
    assert [row["typical"] for row in rows] == ["0"] * 4
    main(["predict", "lightning_logs/version_0", "--images", "images", "--client", "13", "--prediction", "personal"])
    assert "typical" not in (tmp_path / "predictions.csv").read_text(encoding="utf-8")
