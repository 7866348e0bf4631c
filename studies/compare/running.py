# SPDX-License-Identifier: Apache-2.0
"""One run: fit, score, count; and several at once, in processes of their own."""

import logging
import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import active_children, get_context, parent_process
from typing import Any

import pytorch_lightning as pl
import torch
from tqdm import tqdm

from perada.federation.participation import STALE
from perada.lightning.round_warnings import NothingLearnedError
from perada.models.backbones import build_backbone
from perada.results.report import PRIVACY
from perada.studies.compare.plan import CHOSEN_BY, DIAGNOSED, MakeCLI

SCORED = ("personal/", "global/", *DIAGNOSED)
"""How the names of scores begin."""
Result = dict[str, Any]
"""What a run gives: ``run`` and, where it was asked for, ``start``, each scores by name; or ``failed``, the reason."""
Task = tuple[Sequence[str], bool]
"""Options of ``perada fit``, and whether to score the initial model too."""
Event = tuple[int, Result | None]
"""The number of a task, and its result; None when it starts."""
CarryOut = Callable[[Sequence[Task]], Generator[Event]]
"""Runs tasks, and yields starts and results as they come."""
SILENT = "--trainer.enable_progress_bar=false"


class Stopwatch(pl.Callback):
    """Measures training, with the server's part and final fine-tuning, without set-up and validation."""

    def __init__(self) -> None:
        self.seconds = self._since = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start, or resume."""
        self._since = time.perf_counter()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop, or pause; the callbacks before this one have fine-tuned."""
        self.seconds += time.perf_counter() - self._since

    on_validation_start = on_train_end
    on_validation_end = on_train_start


def attempt(make_cli: MakeCLI, args: Sequence[str], start: bool, threads: int) -> Result:
    """Run, and turn an error into its reason; with ``start`` the initial model is scored too.

    The number of threads that torch computes with changes results in the last digits.
    """
    before = torch.get_num_threads()
    began = time.perf_counter()
    try:
        torch.set_num_threads(threads)
        with quiet():
            result = _run(make_cli, args, start)
    except Exception as error:  # whatever it is, the other runs continue
        result = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    finally:
        torch.set_num_threads(before)
    return result | {"seconds": time.perf_counter() - began}


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out what Lightning tells of every trainer; warnings stay."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)


def _run(make_cli: MakeCLI, args: Sequence[str], start: bool) -> Result:
    cli = make_cli(args)
    if shorter := same_budget(cli):
        cli = make_cli([*args, *shorter])
    result: Result = {}
    if start:
        cli.trainer.test(cli.model, cli.datamodule, verbose=False)  # with the shifts
        result["start"] = _known(cli.model.scores)
    watch = Stopwatch()
    cli.trainer.callbacks.append(watch)
    with suppress(NothingLearnedError), warnings.catch_warnings():  # the table shows a run without one as diverged
        warnings.filterwarnings("ignore", STALE)  # which the table has a note on
        cli.trainer.fit(cli.model, cli.datamodule)
    whole = build_backbone(cli.model.backbone, cli.model.num_classes, pretrained=False, image_size=cli.model.image_size)
    tensors = [*whole.model.parameters(), *whole.model.buffers()]
    history, last = cli.loop.history, cli.loop.history[-1]
    measured = [cli.model.scores[name] for name in CHOSEN_BY if name in cli.model.scores]
    measured += [value for record in history for name, value in record.items() if name.startswith("train/")]
    federation = cli.loop.parts.federation
    tested = [count for count in cli.model.results.details.get("test_images", []) if count]
    seconds = watch.seconds
    shifted = cli.model.results.shifted
    if shifted is not None and cli.datamodule.shifts_when == "end":
        seconds -= shifted.seconds  # they are scored after the last round, outside of validation
    result["run"] = _known(cli.model.scores) | {
        "diverged": not all(map(math.isfinite, measured)),
        "local_steps": last["step"],
        "num_clients": cli.loop.num_clients,
        "last_rounds": list(federation.last_rounds),
        "stale_clients": len(federation.participation.stale) if federation.keeps_personal_models else 0,
        "test_images": [min(tested), max(tested)] if tested else [],
        **per_client(history, cli.loop.clients_per_round or cli.loop.num_clients),
        "full/params": sum(p.numel() for p in whole.model.parameters()),
        "full/mb": sum(t.numel() * t.element_size() for t in tensors) / 1e6,
        "seconds_per_round": seconds / len(history),
        **epsilons(last),
        **curves(history),
    }
    return result


def per_client(history: Sequence[dict[str, float]], clients: int) -> dict[str, float]:
    """What one client trains and sends in a round: means over the rounds in which all ``clients`` took part.

    Who has spent a privacy budget sends nothing, so that rounds with fewer clients have less to send for a parameter.

    >>> rounds = [(3.0, 24.0), (1.0, 8.0), (1.0, 4.0)]  # in the last, one client of two
    >>> per_client([{"params/trained": n, "params/sent": n, "comm/up_mb": mb} for n, mb in rounds], clients=2)
    {'params/trained': 2.0, 'params/sent': 2.0, 'mb_sent': 8.0}
    """
    fullness = [row["comm/up_mb"] / row["params/sent"] if row["params/sent"] else 0.0 for row in history]
    fewest = (clients - 0.5) / clients * max(fullness)
    rows = [row for row, full in zip(history, fullness, strict=True) if full >= fewest]
    names = {"params/trained": 1, "params/sent": 1, "comm/up_mb": clients}
    trained, sent, up = (sum(row[name] for row in rows) / len(rows) / number for name, number in names.items())
    return {"params/trained": trained, "params/sent": sent, "mb_sent": up}


def curves(history: Sequence[dict[str, float]]) -> dict[str, list[dict[str, float | None]]]:
    """Scores and diagnostics after each round that has some; ``round`` is counted from 1. Nothing if only one has."""
    rows = []
    for record in history:
        if any(name in CHOSEN_BY or name.startswith(DIAGNOSED) for name in record):
            own = {name: value for name, value in record.items() if name.startswith(SCORED)}
            rows.append({"round": record["round"] + 1, **_known(own)})
    return {"history": rows} if len(rows) > 1 else {}


def same_budget(cli: Any) -> list[str]:  # noqa: ANN401 - a LightningCLI
    """Options that give an algorithm of several phases as many minibatches a round as one with a single phase.

    An algorithm that trains one part after the other (FedRep, FedAlt) divides the round's local steps or epochs among
    its phases; steps are rounded down, and are at least one each. Where a phase was given a length of its own, that is
    respected, and the budget is left as it is.
    """
    phases, given = cli.loop.phases, cli.config.federated
    steps, epochs = given.local_steps, None if given.local_steps else given.local_epochs
    if len(phases) < 2 or any((phase.steps, phase.epochs) != (steps, epochs) for phase in phases):
        return []
    if steps:
        return [f"--federated.local_steps={max(1, steps // len(phases))}"]
    return [f"--federated.local_epochs={given.local_epochs / len(phases)}"]


def epsilons(last: dict[str, float]) -> dict[str, float | str]:
    """ε after the last round by name; empty where the run was not private. Infinity, which is not JSON, is a word."""
    found = {name: value for name, value in last.items() if name.startswith(PRIVACY) and "epsilon" in name}
    return {name: value if math.isfinite(value) else str(value) for name, value in found.items()}


def _known(scores: dict[str, float]) -> dict[str, float | None]:
    """NaN is not JSON."""
    return {name: value if math.isfinite(value) else None for name, value in scores.items()}


@contextmanager
def runner(make_cli: MakeCLI, threads: int, jobs: int) -> Iterator[CarryOut]:
    """What runs tasks, each with so many ``threads``: this process or, for several ``jobs`` at once, so many others.

    Those end with the ``with`` statement, at once where it ends in an error.
    """
    if jobs == 1:
        yield partial(_in_process, make_cli, threads)
        return
    before = dict(os.environ)
    # Processes inherit it: libraries read the first as they are imported, Python the other.
    os.environ.update({"OMP_NUM_THREADS": str(threads), "PYTHONSAFEPATH": "1"})
    pools = [_pool() for _ in range(jobs)]
    try:
        yield partial(_in_pools, pools, make_cli, threads)
    except BaseException:
        for process in active_children():
            process.kill()
        raise
    finally:
        for pool in pools:
            pool.shutdown()
        os.environ.clear()
        os.environ.update(before)


def _in_process(make_cli: MakeCLI, threads: int, tasks: Sequence[Task]) -> Generator[Event]:
    for number, (args, start) in enumerate(tasks):
        yield number, None
        yield number, attempt(make_cli, args, start, threads)


def _in_pools(
    pools: list[ProcessPoolExecutor], make_cli: MakeCLI, threads: int, tasks: Sequence[Task]
) -> Generator[Event]:
    """Run tasks, started in this order. A pool has one process, so that one that dies takes only its own run along."""
    waiting, free = [*enumerate(tasks)][::-1], [*range(len(pools))]
    under_way: dict[Future[Result], tuple[int, int]] = {}
    while waiting or under_way:
        while waiting and free:
            number, (args, start) = waiting.pop()
            yield number, None
            future = pools[free[-1]].submit(attempt, make_cli, [*args, SILENT], start, threads)
            under_way[future] = number, free.pop()
        for future in wait(under_way, return_when=FIRST_COMPLETED).done:
            number, place = under_way.pop(future)
            try:
                result = future.result()
            except BrokenProcessPool:
                result = {"failed": "its process was killed, or crashed, before it was done", "seconds": 0.0}
                pools[place] = _pool()
            free.append(place)
            yield number, result


def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"), initializer=_begin)


def _begin() -> None:
    """Prepare a process: it ends with the one that started it, which Ctrl-C is for; it prints to standard error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a process that is killed leaves behind
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
