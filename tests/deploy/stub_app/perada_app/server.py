# SPDX-License-Identifier: Apache-2.0
"""Rounds of a server that has one tensor: the mean of what the sites send is the next one.

With sites that add 1, 2 and 3, it is 2 after one round, and 2·R after R rounds, if each round counts once.
"""

import os
import time
from pathlib import Path

import numpy as np
import yaml
from safetensors.numpy import load, load_file, save, save_file

from perada.deploy.flower.app import server_app


def serve(recipe, transport, options, state, _):
    given = yaml.safe_load(recipe.read_text())
    state.mkdir(parents=True, exist_ok=True)
    file = state / "server.safetensors"
    start = {"w": np.zeros(given["length"], np.float32), "round": np.array([0])}
    tensors = load_file(file) if options.resume and file.exists() else start
    while tensors["round"][0] < given["rounds"]:
        number = int(tensors["round"][0])
        while len(transport.names()) < options.min_sites:
            time.sleep(0.5)
        began = time.monotonic()
        results = transport.exchange(
            {name: save(tensors) for name in transport.names()}, options.min_sites, options.deadline
        )
        replies = [load(reply)["w"] for reply in results.values() if isinstance(reply, bytes)]
        said = {name: "replied" if isinstance(reply, bytes) else reply.code for name, reply in results.items()}
        print(f"ROUND {number} {said} {time.monotonic() - began:.2f} s", flush=True)
        if len(replies) < options.min_sites and options.late == "wait":
            continue
        mean = np.mean(replies, 0) if replies else tensors["w"]
        tensors = {"w": mean, "round": np.array([number + 1])}
        new = file.with_suffix(".new")
        save_file(tensors, new)
        os.replace(new, file)
    print(f"RESULT {tensors['w'][0]:g} {tensors['w'][-1]:g}", flush=True)


app = server_app(serve, Path(__file__).with_name("recipe.yaml"))
