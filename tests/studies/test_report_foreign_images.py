# SPDX-License-Identifier: Apache-2.0
"""The section on images that look foreign, of runs whose clients predict with both of their models."""

import csv
import math
from importlib.metadata import version

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.neighbors import NearestNeighbors
from torch.utils.data import TensorDataset

import perada
from perada.algorithms import Ditto
from perada.api import make_trainer
from perada.cli import main
from perada.lightning import FederatedLoop, PredictionFile
from perada.studies.report.foreign_images import foreign_shares
from perada.studies.report.pictures import find_foreign_images
from perada.studies.report.records import RunRecord
from perada.studies.report.sections import sections
from tests.federation.test_both_models import fitted, is_typical_by_hand, pixel_statistics, shifted


def clients_with_foreign_images(tiny):
    """Clients each of which has some test images that are much darker than its training images."""
    data = shifted(tiny)
    for client, part in enumerate(data.test):
        images, labels = part.tensors
        images = images.clone()
        images[:: client + 2] -= 12
        data.test[client] = TensorDataset(images, labels)
    return data


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    fitted(tiny, clients_with_foreign_images(tiny), logger=True, default_root_dir=str(root))
    return root / "lightning_logs" / "version_0"


def test_the_page_has_the_share_of_each_clients_images(tiny, folder, tmp_path):
    main(["report", str(folder), "--output", str(tmp_path)])
    data = clients_with_foreign_images(tiny)
    expected = {}
    for client in range(5):
        training_images, _ = data.train[client].tensors
        images, _ = data.test[client].tensors
        is_foreign = ~is_typical_by_hand(training_images, images)
        others = torch.cat([data.test[other].tensors[0] for other in range(5) if other != client])
        is_foreign_of_others = ~is_typical_by_hand(training_images, others)
        expected[str(client)] = (
            len(images),
            int(is_foreign.sum()) / len(images),
            int(is_foreign_of_others.sum()) / len(others),
        )
    with (tmp_path / "foreign_images.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["client"] for row in rows} == expected.keys()
    for row in rows:
        num_images, share, share_of_others = expected[row["client"]]
        assert int(row["test images"]) == num_images
        assert float(row["own images"]) == pytest.approx(share, abs=1e-6)
        assert float(row["other clients' images"]) == pytest.approx(share_of_others, abs=1e-6)
    assert len({row["other clients' images"] for row in rows}) > 2
    with (tmp_path / "run.csv").open(encoding="utf-8", newline="") as file:
        settings = {row["setting"]: row["value"] for row in csv.DictReader(file)}
    assert settings["versions.torch"] == torch.__version__
    assert settings["versions.perada"] == version("perada")
    shares = [float(row["own images"]) for row in rows]
    assert shares == sorted(shares, reverse=True)
    assert len({*shares}) > 2
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "Images that look foreign" in page
    assert f"<td>{100 * shares[0]:.1f}</td>" in page
    assert (tmp_path / "foreign_images.png").is_file()


def test_shares_of_shifted_images_have_columns_of_their_own(tmp_path):
    """Shares are in % also in runs whose scores are numbers."""
    clients = {
        "personal/local_test": [0.5, 0.25, math.nan],
        "typical/local_test": [0.75, 0.5, math.nan],
        "typical/fog": [0.125, 0.25, 0.0],
    }
    record = RunRecord(
        "run", tmp_path, {"task": {"has_classes": False}}, scores_of_clients=clients, test_images=[4, 8, 0]
    )
    assert [(foreign.client, foreign.share) for foreign in foreign_shares(record)] == [(1, 0.5), (0, 0.25)]
    (section,) = (section for section in sections(record) if section.key == "foreign_images")
    (table,) = section.tables
    assert table.column_names == ["client", "test images", "own images", "fog"]
    texts = [[table.text_of(row, column) for column in range(4)] for row in table.rows]
    assert texts == [["1", "8", "50.0", "75.0"], ["0", "4", "25.0", "87.5"]]


def test_a_client_that_has_all_test_images_has_no_others(tmp_path):
    clients = {"typical/local_test": [0.75, math.nan], "typical/global_test": [0.75, 0.5]}
    record = RunRecord("run", tmp_path, scores_of_clients=clients, test_images=[4, 0])
    (foreign,) = foreign_shares(record)
    assert math.isnan(foreign.share_of_others)
    (section,) = (section for section in sections(record) if section.key == "foreign_images")
    assert section.tables[0].column_names == ["client", "test images", "own images"]


def predictions(folder, rows):
    """A folder of `perada predict --config`, with a picture for each of some rows of client and distance."""
    (folder / "predictions").mkdir(parents=True)
    lines = ["image,client,label,personal,global,distance,foreign_picture"]
    for number, (client, distance) in enumerate(rows):
        path = f"predictions/{number}.png"
        Image.new("L", (8, 8), 20 * number).save(folder / path)
        lines.append(f"{number},{client},0,1,1,{distance},{path}")
    lines.append("99,0,0,1,1,0.5,")
    (folder / "predictions.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def test_the_most_foreign_images_of_each_client_are_found(tmp_path):
    rows = [(1, 1.5), (0, 2.0), (1, 9.0), (1, "inf"), (1, 1.2), (1, 4.0), (0, 3.0)]
    result = find_foreign_images(predictions(tmp_path / "few", rows), num_clients=2)
    order = [(image.client, image.number, image.distance) for image in result]
    assert order == [(0, 6, 3.0), (0, 1, 2.0), (1, 3, math.inf), (1, 2, 9.0), (1, 5, 4.0), (1, 0, 1.5)]
    many = [(client, 2 + client) for client in range(20)]
    result = find_foreign_images(predictions(tmp_path / "many", many), num_clients=20)
    assert [image.client for image in result] == list(range(8, 20))


@pytest.mark.parametrize(
    ("rows", "num_clients", "message"),
    [([(3, 2.0)], 2, "has a client 3, but the run has 2"), ([(0, "far")], 2, r"distance .*'far'")],
)
def test_damaged_tables_are_rejected(tmp_path, rows, num_clients, message):
    with pytest.raises(ValueError, match=message):
        find_foreign_images(predictions(tmp_path / "damaged", rows), num_clients)


def test_a_page_shows_pictures_only_on_request(folder, tmp_path):
    main(["report", str(folder), "--output", str(tmp_path / "plain")])
    plain = (tmp_path / "plain" / "index.html").read_text(encoding="utf-8")
    assert "those who may see" not in plain
    assert not (tmp_path / "plain" / "foreign_pictures.png").exists()
    pictures = predictions(tmp_path / "predicted", [(0, 2.5), (3, 4.0)])
    main(["report", str(folder), "--output", str(tmp_path / "page"), "--pictures", str(pictures)])
    page = (tmp_path / "page" / "index.html").read_text(encoding="utf-8")
    # Heat maps of counts are pictures as well.
    assert page.count("data:image/png") == plain.count("data:image/png") + 2
    assert "The largest: 4 (client 3, image 1)" in page
    assert "Share this page only with those who may see the images." in page


def distance_ratios_by_hand(training_images, images):
    """Distances to the third nearest training image, relative to the 99 % quantile of those among these."""
    if len(training_images) < 10:
        return np.zeros(len(images))
    examples = pixel_statistics(training_images)
    deviation = np.maximum(examples.std(0), 0.1 * examples.std(0).mean())
    search = NearestNeighbors(n_neighbors=3).fit(examples / deviation)
    among_examples, _ = search.kneighbors()
    distances, _ = search.kneighbors(pixel_statistics(images) / deviation)
    return distances[:, -1] / np.quantile(among_examples[:, -1], 0.99)


def test_the_most_distant_images_are_written_with_the_predictions(tiny, tmp_path):
    data = clients_with_foreign_images(tiny)
    module = perada.FederatedClassifier(tiny.net(), "full")
    # Long steps, so that the two models of a client predict different classes.
    training = perada.Training(lr_personal=0.3, lr_local=0.3, local_epochs=4)
    loop = FederatedLoop(Ditto(prox_strength=0.0), training=training, evaluation=perada.Evaluation(prediction="both"))
    trainer = make_trainer(
        loop, 1, default_root_dir=str(tmp_path), accelerator="cpu", enable_progress_bar=False, callbacks=[]
    )
    datamodule = perada.FederatedDataModule(data, batch_size=4, eval_batch_size=7)
    trainer.fit(module, datamodule)
    trainer.callbacks.append(PredictionFile())
    trainer.predict(module, datamodule)
    (table,) = tmp_path.rglob("predictions.csv")
    with table.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    run = loop.outcome(module)
    num_pictures = 0
    for client, part in enumerate(data.test):
        images, _ = part.tensors
        expected = distance_ratios_by_hand(data.train[client].tensors[0], images)
        rows_of_client = [row for row in rows if row["client"] == str(client)]
        assert [float(row["distance"]) for row in rows_of_client] == pytest.approx(expected.tolist(), rel=1e-3)
        assert [int(row["both"]) for row in rows_of_client] == run.predict(images, client).labels.tolist()
        assert [row["both"] for row in rows_of_client if float(row["distance"]) > 1] == [
            row["global"] for row in rows_of_client if float(row["distance"]) > 1
        ]
        most_distant = [place for place in np.argsort(-expected)[:4].tolist() if expected[place] > 1]
        have_pictures = [place for place, row in enumerate(rows_of_client) if row["foreign_picture"]]
        assert have_pictures == sorted(most_distant)
        for place in have_pictures:
            pixels = images[place, 0].numpy()
            scaled = 255 * (pixels - pixels.min()) / (pixels.max() - pixels.min())
            with Image.open(table.parent / rows_of_client[place]["foreign_picture"]) as picture:
                assert np.abs(np.array(picture) - scaled).max() <= 0.51
        num_pictures += len(have_pictures)
    assert num_pictures > 4
    assert any(row["both"] != row["personal"] for row in rows)


def test_other_runs_have_no_such_section(tmp_path):
    record = RunRecord("run", tmp_path, scores_of_clients={"personal/local_test": [0.5, 0.25]}, test_images=[4, 8])
    assert "foreign_images" not in {section.key for section in sections(record)}
