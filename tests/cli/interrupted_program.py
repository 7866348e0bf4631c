# SPDX-License-Identifier: Apache-2.0
"""The program with images that workers read, of which all processes receive a signal at a chosen moment.

Arguments: the signal's name, the moment, and those of ``perada``. Nothing is sent at the moment ``never``.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from perada.cli.main import entry_point
from perada.data import ImageSet

MAIN = os.getpid()


def send(signal_name, once):
    """Let another process send the signal to all processes of the run, the first time only."""
    try:
        Path(once).touch(exist_ok=False)
    except FileExistsError:
        return
    subprocess.run(["kill", f"-{signal_name}", "--", f"-{os.getpgid(MAIN)}"], check=False)


class Read(ImageSet):
    """Images that are made one by one; ``once`` is made when the signal is sent."""

    num_classes = 3

    def __init__(self, signal_name="INT", moment="never", once="once", train=True):
        super().__init__(train)
        self.signal_name = signal_name
        self.moment = moment
        self.once = once

    def _load_images(self):
        return None, torch.arange(60) % 3

    def __len__(self):
        return 60

    def __getitem__(self, index):
        begun = list(Path().glob("lightning_logs/*/checkpoints/last.ckpt"))
        in_worker = os.getpid() != MAIN
        if self.moment == "death" and begun and in_worker and index > 50:
            os.kill(os.getpid(), 9)
        if in_worker and (self.moment == "set-up" or (self.moment == "reading" and begun)):
            send(self.signal_name, self.once)
            time.sleep(0.05)
        return torch.full((1, 16, 16), index, dtype=torch.uint8), self.labels[index]


def main():
    name, moment, *words = sys.argv[1:]
    shut_down = _MultiProcessingDataLoaderIter._shutdown_workers
    start = _MultiProcessingDataLoaderIter.__init__

    def signalled_at_the_end(iterator):
        if list(Path().glob("lightning_logs/*/checkpoints/last.ckpt")) and not iterator._shutdown:
            send(name, "once")
        shut_down(iterator)

    def signalled_at_the_start(iterator, loader):
        # Workers start at set-up, and are kept for all rounds.
        start(iterator, loader)
        send(name, "once")

    if moment == "shutdown":
        _MultiProcessingDataLoaderIter._shutdown_workers = signalled_at_the_end
    if moment == "start":
        _MultiProcessingDataLoaderIter.__init__ = signalled_at_the_start
    sys.argv = ["perada", *words]
    entry_point()


if __name__ == "__main__":
    main()
