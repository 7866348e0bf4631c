# SPDX-License-Identifier: Apache-2.0
"""A site's worker for tests of the transport: adds its site's number to the one tensor of a safetensors message.

python stub_worker.py SOCKET NUMBER SECONDS
"""

import sys
import time

import numpy as np
from safetensors.numpy import load, save

from perada.deploy.flower.socket import Listener


def main():
    path = sys.argv[1]
    number = float(sys.argv[2])
    seconds = float(sys.argv[3])

    def answer(message, run):
        tensors = load(message)
        print("round", int(tensors["round"][0]), flush=True)
        time.sleep(seconds)
        if number < 0:
            raise ValueError("patient 4711 has no image")
        return save({"w": tensors["w"] + np.float32(number), "round": tensors["round"]})

    with Listener(path) as listener:
        listener.serve(answer)


if __name__ == "__main__":
    main()
