# SPDX-License-Identifier: Apache-2.0
"""What a rejected run leaves in the folder of runs, and what it leaves alone."""

import pytest
import pytorch_lightning as pl
from pytorch_lightning.loggers import CSVLogger

from perada.lightning.run_folder import discard_folder_on_rejection


def rejected_folder(tmp_path, *files):
    trainer = pl.Trainer(logger=CSVLogger(tmp_path), accelerator="cpu", enable_checkpointing=False)
    folder = tmp_path / "lightning_logs" / "version_0"
    with pytest.raises(ValueError, match="no"), discard_folder_on_rejection(trainer):
        assert trainer.log_dir == str(folder)
        folder.mkdir(parents=True)
        for name in files:
            (folder / name).touch()
        raise ValueError("no")
    return folder


def test_nothing_is_left_of_a_rejected_run(tmp_path):
    assert not rejected_folder(tmp_path).parent.exists()


@pytest.mark.parametrize("name", ["hparams.yaml", "metrics.csv", "partition.json", "events.out.tfevents.1.host.1.0"])
def test_the_folder_that_another_process_took_stays(tmp_path, name):
    """Both had found the same number free."""
    assert (rejected_folder(tmp_path, name) / name).is_file()
