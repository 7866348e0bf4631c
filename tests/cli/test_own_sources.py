# SPDX-License-Identifier: Apache-2.0
"""Image sets that are written outside perada, where the command line asks them what they are."""

import numpy as np
from PIL import Image

from perada.cli.data import make_division
from perada.data import IID, ByDomain, FederatedDataModule
from perada.data.sets.base import Manifest
from perada.data.sets.manifest import OwnImages
from perada.tasks import Segmentation


class Files(OwnImages):
    """The images of a folder, whose names begin with the client's, such as ``a1.png``, if there is an underscore."""

    task = Segmentation()

    def read_manifest(self):
        paths = sorted(map(str, self.folder.glob("*.png")))
        clients = np.array([path.rpartition("/")[2][0] for path in paths], dtype=object)
        labels = np.arange(len(paths)) % 2
        return Manifest(paths, labels, ("no", "yes"), {"client": clients} if self.named else {})

    @property
    def names_clients(self):
        return self.named


def test_a_source_of_ones_own_says_whether_it_names_clients(tmp_path):
    for name in ("a1", "a2", "a3", "a4", "b1", "b2", "b3", "b4"):
        Image.fromarray(np.full((8, 8, 3), 9, dtype=np.uint8)).save(tmp_path / f"{name}.png")
    Files.folder = tmp_path
    for Files.named in (True, False):
        division = make_division(str(tmp_path), Files, {"size": 8})
        assert isinstance(division.partition, ByDomain if Files.named else IID)
        num_clients = len(division.share_out().train)
        assert num_clients == (2 if Files.named else 1)


def test_a_source_of_ones_own_says_what_is_learnt_from_it(monkeypatch):
    """A network for masks is built where the data fail for another reason, so that its errors are found too."""
    from perada.cli import setup_errors

    built = []

    class Spec:
        pretrained = False

        def __init__(self, per_pixel=None):
            self.per_pixel = per_pixel

        def build(self):
            built.append(self.per_pixel)

    monkeypatch.setattr(setup_errors, "replace", lambda spec, num_classes, per_pixel: Spec(per_pixel))
    module = type("Module", (), {"spec": Spec(), "num_classes": 2})()
    Files.named = False
    data = FederatedDataModule(dataset=Files("/nowhere"), partition=IID(1))
    assert setup_errors._errors_of_model(data, module) == []
    assert built == [True]
