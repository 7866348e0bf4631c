# SPDX-License-Identifier: Apache-2.0
"""As a script, a run of which process 1 is killed within round 2, when process 0 is busy for some seconds more."""

import os
import signal
import sys
import time

import pytorch_lightning as pl


class Killed(pl.Callback):
    """Ends process 1 without a word."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == 1 and trainer.current_epoch == 2 and batch_idx == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.global_rank == 0 and trainer.current_epoch == 2 and batch_idx == 1:
            time.sleep(float(sys.argv[2]))  # busy with its clients


if __name__ == "__main__":
    from tests.distributed.job import run

    run("perada", 2, 4, callbacks=Killed(), logger=True, default_root_dir=sys.argv[1])
