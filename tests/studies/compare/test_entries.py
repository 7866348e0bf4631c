# SPDX-License-Identifier: Apache-2.0
"""A row of a comparison trains the algorithm that its name stands for."""

import pytest
from jsonargparse import Namespace

from perada.studies.compare.entries import entry_of


@pytest.mark.parametrize("path", ["perada.algorithms.PerAda", "perada.algorithms.perada.PerAda"])
def test_an_algorithm_is_itself_under_every_path_that_names_its_class(path):
    entry_of("perada").check(Namespace(class_path=path, init_args=Namespace(prox_strength=0.3, distill=True)))


@pytest.mark.parametrize(
    ("path", "init_args", "message"),
    [
        ("perada.algorithms.Ditto", {"prox_strength": 0.3}, r"changes it to perada\.algorithms\.Ditto"),
        ("perada.algorithms.PerAda", {"distill": False}, "changes it to distill=False"),
    ],
)
def test_another_algorithm_is_rejected(path, init_args, message):
    with pytest.raises(ValueError, match=message):
        entry_of("perada").check(Namespace(class_path=path, init_args=Namespace(**init_args)))


def test_an_algorithm_inside_another_is_compared_by_its_class():
    base = Namespace(class_path="perada.algorithms.PerAda", init_args=Namespace())
    algorithm = Namespace(class_path="perada.algorithms.FedEnsemble", init_args=Namespace(base=base, modes=5))
    entry_of("fed_ensemble_perada").check(algorithm)
