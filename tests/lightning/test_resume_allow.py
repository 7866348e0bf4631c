# SPDX-License-Identifier: Apache-2.0
"""Names in `resume_allow` are checked when a loop is created, whether or not it resumes anything."""

import pytest

import perada
from perada.cli import main
from perada.lightning.run_fingerprint import OPTION_NAMES, run_fingerprint

from .test_federated_loop import build

LR_LOCAL = "resume_allow='{}' is unknown; did you mean 'training.lr_local'?"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("training.lr_locl", LR_LOCAL),
        ("lr_local", LR_LOCAL),
        ("everything", "resume_allow='{}' is unknown; choose one of clients, images, training.lr_personal, "),
        ("training.engine", "resume_allow='{}' is not needed: the results do not depend on this option"),
    ],
)
def test_a_name_that_means_nothing_is_rejected_although_nothing_is_resumed(tiny, name, message):
    expected = message.format(name)
    with pytest.raises(ValueError) as error:
        perada.FederatedLoop(resume_allow=["images", name])
    assert str(error.value).startswith(expected)
    with pytest.raises(ValueError) as error:
        perada.finetune(tiny.net(), tiny.data(), resume_allow=[name], rounds=1)
    assert str(error.value).startswith(expected)
    with pytest.raises(ValueError) as error:
        main(["fit", "--config", "digits", f"--federated.resume_allow=[{name}]"])
    assert str(error.value).startswith(expected)


def test_the_names_are_those_that_a_checkpoint_records(tiny, tmp_path):
    trainer, module, data, loop = build(tiny, tmp_path, logger=False)
    trainer.fit(module, datamodule=data)
    assert sorted(run_fingerprint(loop.context).options) == sorted(OPTION_NAMES)
    assert perada.FederatedLoop(resume_allow=["clients", "images", *OPTION_NAMES]).resume_allow[2:] == [*OPTION_NAMES]
