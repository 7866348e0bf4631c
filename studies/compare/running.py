# SPDX-License-Identifier: Apache-2.0
"""One run: its fit, scores and costs; and several runs at once, each in its own process."""

import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from tqdm import tqdm

from perada.data.batches.features import SharedFeatures, sharing_features
from perada.federation.participation import STALE
from perada.lightning.module import FederatedClassifier
from perada.lightning.round_warnings import NothingLearnedError
from perada.lightning.trainer_attributes import callbacks_of
from perada.models.backbones import build_backbone
from perada.results.report import PRIVACY, SCORE_GROUPS, SCORES_OF_BOTH, TYPICAL_SHARES
from perada.results.restore import plain_data
from perada.scores.failed_outputs import describe_failed
from perada.studies.compare.configured import ConfiguredRun, MakeCLI
from perada.studies.compare.node import KeptRound, SameData
from perada.studies.compare.plan import DIAGNOSTIC_PREFIXES, SELECTION_SCORES, digest_of_recipe
from perada.system.quiet import info_messages_disabled

SCORE_PREFIXES = (*SCORE_GROUPS, TYPICAL_SHARES, *DIAGNOSTIC_PREFIXES)
"""Beginnings of the names of scores."""
SHARED_FEATURES_BYTES = 500 * 2**20
"""Memory limit in each process for the outputs of frozen layers that its runs share."""
NO_PROGRESS_BAR = "--trainer.enable_progress_bar=false"
CLIENT_SCORES = ("personal/local_test", "personal/global_test", *SCORES_OF_BOTH)
"""Scores that are written for each client."""
LOCAL_STEPS = "training.local_steps"
LOCAL_EPOCHS = "training.local_epochs"
Result = dict[str, Any]
"""Scores of a run by name: ``run``, and ``start`` for the initial model if they were requested; or ``failed``, the
reason."""


@dataclass(frozen=True)
class Segment:
    """A segment of a run's rounds, from its checkpoint to the next one.

    A run that is trained in segments ends in the same states as one that is not interrupted.

    Attributes:
        last_round: Number of rounds after which training pauses. The models are then scored, as they are at the end.
        checkpoint: File that is written when training pauses.
        start: Checkpoint of an earlier round, from which training goes on; None to begin with the first round.
    """

    last_round: int
    checkpoint: Path
    start: Path | None = None


class RunTask(NamedTuple):
    """A run to be made.

    Attributes:
        args: Options of ``perada fit``.
        scores_start: Whether to score the initial model too.
        segment: The rounds to train; None for all of them.
        end_by: Time (``time.time``) at which a run that is not done fails; None for no limit.
        recipe_digest: Digest that the recipe must have when the run begins; empty for any.
        kept_round: File in which the run is saved after each round, and from which it goes on; None to save none.
        data_folder: Folder of files by which runs make sure that they have the same images; None for no check.
    """

    args: Sequence[str]
    scores_start: bool
    segment: Segment | None = None
    end_by: float | None = None
    recipe_digest: str = ""
    kept_round: Path | None = None
    data_folder: Path | None = None


class Event(NamedTuple):
    """The start of a task, or its end.

    Attributes:
        number: Number of the task, from 0.
        result: Its result; None at its start.
    """

    number: int
    result: Result | None


CarryOut = Callable[[Sequence[RunTask]], Generator[Event]]
"""Runs tasks, and yields starts and results as they come."""


class Stopwatch(pl.Callback):
    """Measures training, including the server's part and final fine-tuning, without set-up and validation."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started_at = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start, or resume."""
        self._started_at = time.perf_counter()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop, or pause; the callbacks before this one have fine-tuned."""
        self.seconds += time.perf_counter() - self._started_at

    on_validation_start = on_train_end
    on_validation_end = on_train_start


class OutOfTimeError(Exception):
    """A run was not done when its time was over."""


class RoundClock(pl.Callback):
    """Measures rounds, pauses a run after the last round of its segment, and ends it when its time is over.

    Args:
        task: The run.

    Attributes:
        seconds_of_rounds: Duration of each round that was trained.
    """

    def __init__(self, task: RunTask) -> None:
        self.task = task
        self.seconds_of_rounds: list[float] = []
        self._started_at = 0.0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock of a round."""
        self._started_at = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Save the run after the last round of its segment; the loop, whose hook comes first, has closed the round."""
        if self.task.end_by is not None and time.time() > self.task.end_by:
            raise OutOfTimeError("the time for all runs was over; allow more, or train fewer rounds")
        if not trainer.is_last_batch:
            return
        self.seconds_of_rounds.append(time.perf_counter() - self._started_at)
        segment = self.task.segment
        rounds_done = trainer.current_epoch + 1
        if segment is None or rounds_done < segment.last_round or rounds_done == trainer.max_epochs:
            return
        # An uninterrupted run would not fine-tune and score the models here, so the checkpoint comes before that.
        trainer.save_checkpoint(segment.checkpoint)
        trainer.should_stop = True


def attempt(make_cli: MakeCLI, task: RunTask, threads: int, anonymous: bool = False) -> Result:
    """Make a run, and turn an error into its reason.

    Args:
        make_cli: See :data:`~perada.studies.compare.configured.MakeCLI`.
        task: The run.
        threads: Threads of torch, on which the last digits of the results depend.
        anonymous: Whether to leave out the names of clients.
    """
    threads_before = torch.get_num_threads()
    started_at = time.perf_counter()
    try:
        torch.set_num_threads(threads)
        with info_messages_disabled():
            result = _run_task(make_cli, task, anonymous)
    except Exception as error:  # whatever it is, the other runs continue
        result = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    finally:
        torch.set_num_threads(threads_before)
    return result | {"seconds": time.perf_counter() - started_at}


def _run_task(make_cli: MakeCLI, task: RunTask, anonymous: bool) -> Result:
    cli = make_cli(task.args)
    check_recipe_digest(cli, task.recipe_digest)
    budget = same_budget(cli)
    if budget:
        cli = make_cli([*task.args, *budget])
    result: Result = {}
    if task.scores_start:
        cli.trainer.test(cli.model, cli.datamodule, verbose=False)  # with the shifts
        result["start"] = _json_numbers(cli.model.scores) | _facts_of_scores(cli)
    clock = RoundClock(task)
    seconds = _fit_timed(cli, task, clock)
    loop = cli.loop
    federation = loop.context.federation
    result["run"] = _json_numbers(cli.model.scores) | {
        "diverged": _has_diverged(cli),
        **_failed_outputs(cli, anonymous),
        "local_steps": loop.history[-1]["step"],
        "num_clients": loop.num_clients,
        "last_rounds": list(federation.last_rounds),
        "stale_clients": len(federation.participation.stale) if federation.keeps_personal_models else 0,
        "test_images": _fewest_and_most(cli.model.results.details.get("test_images", [])),
        **means_per_client(loop.history, loop.clients_per_round or loop.num_clients),
        **_scores_of_clients(cli, anonymous),
        **_facts_of_scores(cli),
        **_full_model_size(cli.model),
        "seconds_per_round": seconds / max(1, len(clock.seconds_of_rounds)),
        **epsilons(loop.history[-1]),
        **curves_of_history(loop.history),
    }
    if task.segment is not None:
        result["run"]["seconds_of_rounds"] = clock.seconds_of_rounds
    return result


def check_recipe_digest(cli: ConfiguredRun, digest: str) -> None:
    """Raise a ValueError if a recipe is not as it was when the command was started, here or on another machine.

    Args:
        cli: A run of the recipe.
        digest: The digest then; empty for any.
    """
    if digest and digest_of_recipe(cli) != digest:
        raise ValueError(
            f"the recipe {str(cli.config.config[0])!r} is not as it was when the command was started; restore it, or "
            "start a comparison with another --output"
        )


def _scores_of_clients(cli: ConfiguredRun, anonymous: bool) -> Result:
    """Return the scores of each client, their numbers of test images, and their names."""
    results = cli.model.results
    scores_by_name: dict[str, list[float | None]] = {}
    for name in CLIENT_SCORES:
        if name in results.per_client:
            scores = results.per_client[name].tolist()
            scores_by_name[name] = [value if math.isfinite(value) else None for value in scores]
    names = None if anonymous else cli.datamodule.client_names
    return {
        "clients": scores_by_name,
        "client_test_images": results.details.get("test_images", []),
        "client_names": None if names is None else list(names),
    }


def _facts_of_scores(cli: ConfiguredRun) -> Result:
    """Return what a table needs to label the scores."""
    return {"has_classes": cli.model.task.has_classes, "metric": cli.model.metrics[0].name}


def _fit_timed(cli: ConfiguredRun, task: RunTask, clock: RoundClock) -> float:
    """Fit, and return the seconds of training without validation."""
    watch = Stopwatch()
    callbacks = callbacks_of(cli.trainer)
    callbacks.extend([clock, watch])
    start = None if task.segment is None else task.segment.start
    if task.data_folder is not None:
        callbacks.append(SameData(task.data_folder, cli))
    if task.kept_round is not None:
        is_private = cli.loop.privacy is not None or cli.loop.client_privacy is not None
        keeping = KeptRound(task.kept_round, saves=not is_private)
        callbacks.append(keeping)
        start = keeping.find() or start
    checkpoint = None if start is None else str(start)
    with ExitStack() as stack:
        # A run in which nothing was learned counts as diverged in the table.
        stack.enter_context(suppress(NothingLearnedError))
        stack.enter_context(plain_data(checkpoint, cli.trainer))
        # The table has a note on stale clients instead of the warning.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", STALE)
        cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=checkpoint, weights_only=True)
    seconds = watch.seconds
    shifted = cli.model.results.shifted
    if shifted is not None and cli.datamodule.shifts_when == "end":
        # Shifted images are scored after the last round, outside validation.
        seconds -= shifted.seconds
    return seconds


def _failed_outputs(cli: ConfiguredRun, anonymous: bool) -> Result:
    """Return a message about models without scores in ``failed_outputs``; nothing if all have some."""
    failed = cli.model.results.failed_outputs
    if not failed:
        return {}
    without_names = anonymous or cli.loop.context.settings.private
    return {"failed_outputs": describe_failed(failed, cli.datamodule.client_names, anonymous=without_names)}


def _has_diverged(cli: ConfiguredRun) -> bool:
    """Return whether a score or a training loss is NaN or infinite."""
    values = [cli.model.scores[name] for name in SELECTION_SCORES if name in cli.model.scores]
    for metrics in cli.loop.history:
        values += [value for name, value in metrics.items() if name.startswith("train/")]
    return not all(math.isfinite(value) for value in values)


def _fewest_and_most(test_images: Sequence[int]) -> list[int]:
    """Return the smallest and the largest number of test images of the clients that have any."""
    counts = [count for count in test_images if count]
    return [min(counts), max(counts)] if counts else []


def _full_model_size(model: FederatedClassifier) -> dict[str, float]:
    """Return the parameters and megabytes of the model that full fine-tuning would train."""
    backbone = build_backbone(
        model.backbone,
        model.num_classes,
        pretrained=False,
        image_size=model.image_size,
        per_pixel=model.task.per_pixel,
        text_head=model.text_head,
    )
    parameters = list(backbone.model.parameters())
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (*parameters, *backbone.model.buffers()))
    return {
        "full/params": sum(parameter.numel() for parameter in parameters),
        "full/mb": num_bytes / 1e6,
    }


def means_per_client(history: Sequence[dict[str, float]], num_clients: int) -> dict[str, float]:
    """Return what one client trains and sends in a round: means over the rounds in which all clients took part.

    A client that has spent its privacy budget sends nothing, so in rounds with fewer clients fewer megabytes are sent
    for each parameter.

    Args:
        history: Metrics of each round.
        num_clients: Clients of a full round.

    >>> rounds = [(3.0, 24.0), (1.0, 8.0), (1.0, 4.0)]  # in the last, one client of two
    >>> means_per_client([{"params/trained": n, "params/sent": n, "comm/up_mb": mb} for n, mb in rounds], 2)
    {'params/trained': 2.0, 'params/sent': 2.0, 'mb_sent': 8.0}
    """
    megabytes_per_parameter = []
    for row in history:
        parameters = row["params/sent"]
        megabytes_per_parameter.append(row["comm/up_mb"] / parameters if parameters else 0.0)
    # Half a client less than in the fullest round: rounding errors are smaller than that.
    fewest = (num_clients - 0.5) / num_clients * max(megabytes_per_parameter)
    full_rounds = [row for row, ratio in zip(history, megabytes_per_parameter, strict=True) if ratio >= fewest]

    def mean_over_rounds(name: str) -> float:
        return sum(row[name] for row in full_rounds) / len(full_rounds)

    return {
        "params/trained": mean_over_rounds("params/trained"),
        "params/sent": mean_over_rounds("params/sent"),
        "mb_sent": mean_over_rounds("comm/up_mb") / num_clients,
    }


def curves_of_history(history: Sequence[dict[str, float]]) -> dict[str, list[dict[str, float | None]]]:
    """Return scores and diagnostics after each round that has some, counted from 1; nothing if only one round has."""
    rows = []
    for metrics in history:
        is_scored = any(name in SELECTION_SCORES or name.startswith(DIAGNOSTIC_PREFIXES) for name in metrics)
        if is_scored:
            scores = {name: value for name, value in metrics.items() if name.startswith(SCORE_PREFIXES)}
            rows.append({"round": metrics["round"] + 1, **_json_numbers(scores)})
    if len(rows) < 2:
        return {}
    return {"history": rows}


def same_budget(cli: ConfiguredRun) -> list[str]:
    """Return options that give algorithms of several phases as many minibatches per round as those of a single phase.

    An algorithm that trains one part after the other (FedRep, FedAlt) divides the round's local steps or epochs among
    its phases; steps are rounded down, and each phase has at least one. If a phase was given a length of its own, that
    is respected, and the budget is left as it is.
    """
    phases = cli.loop.phases
    if len(phases) < 2:
        return []
    local_steps = cli.config.training.local_steps
    local_epochs = cli.config.training.local_epochs
    epochs_of_phase = None if local_steps else local_epochs  # local_steps takes precedence
    if any(phase.steps != local_steps or phase.epochs != epochs_of_phase for phase in phases):
        return []
    if local_steps:
        return [f"--{LOCAL_STEPS}={max(1, local_steps // len(phases))}"]
    return [f"--{LOCAL_EPOCHS}={local_epochs / len(phases)}"]


def epsilons(last: dict[str, float]) -> dict[str, float | str]:
    """Return ε after the last round by name; nothing for a run without privacy.

    Infinity, which JSON does not have, becomes a string.
    """
    epsilon_by_name: dict[str, float | str] = {}
    for name, value in last.items():
        if name.startswith(PRIVACY) and "epsilon" in name:
            epsilon_by_name[name] = value if math.isfinite(value) else str(value)
    return epsilon_by_name


def _json_numbers(mean_scores: dict[str, float]) -> dict[str, float | None]:
    """Replace NaN and infinity, which JSON does not have, by None."""
    return {name: value if math.isfinite(value) else None for name, value in mean_scores.items()}


@contextmanager
def task_runner(make_cli: MakeCLI, threads: int, jobs: int, anonymous: bool = False) -> Iterator[CarryOut]:
    """Provide the function that runs tasks, in this process or in several others.

    The processes end with the ``with`` statement, and are killed if it ends with an error.

    Args:
        make_cli: See :data:`~perada.studies.compare.configured.MakeCLI`.
        threads: Threads of each run.
        jobs: Runs at once; several have a process each.
        anonymous: Whether to leave out the names of clients.
    """
    attempt_task = partial(attempt, make_cli, threads=threads, anonymous=anonymous)
    if jobs == 1:
        with sharing_features(SharedFeatures(SHARED_FEATURES_BYTES)):
            yield partial(_run_in_process, attempt_task)
        return
    # Processes of others, such as those that read images for a run of the caller, are left alone.
    other_children = active_children()
    environment = dict(os.environ)
    # The processes inherit both: libraries read the first as they are imported, Python reads the second.
    os.environ.update({"OMP_NUM_THREADS": str(threads), "PYTHONSAFEPATH": "1"})
    pools = [_new_pool() for _ in range(jobs)]
    try:
        yield partial(_run_in_pools, pools, attempt_task)
    except BaseException:
        for process in active_children():
            if process not in other_children:
                process.kill()
        raise
    finally:
        for pool in pools:
            pool.shutdown()
        os.environ.clear()
        os.environ.update(environment)


def _run_in_process(attempt_task: Callable[[RunTask], Result], tasks: Sequence[RunTask]) -> Generator[Event]:
    for number, task in enumerate(tasks):
        yield Event(number, None)
        yield Event(number, attempt_task(task))


@dataclass(frozen=True)
class RunningTask:
    """The number of a task, and the index of the pool that runs it."""

    number: int
    pool_index: int


def _run_in_pools(
    pools: list[ProcessPoolExecutor], attempt_task: Callable[[RunTask], Result], tasks: Sequence[RunTask]
) -> Generator[Event]:
    """Run tasks, started in this order. Each pool has one process, so a process that dies ends only its own run."""
    next_number = 0
    free_pools = list(range(len(pools)))
    running: dict[Future[Result], RunningTask] = {}
    while next_number < len(tasks) or running:
        while next_number < len(tasks) and free_pools:
            task = tasks[next_number]
            yield Event(next_number, None)
            pool_index = free_pools.pop()
            silent_task = task._replace(args=[*task.args, NO_PROGRESS_BAR])
            future = pools[pool_index].submit(attempt_task, silent_task)
            running[future] = RunningTask(number=next_number, pool_index=pool_index)
            next_number += 1
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            ended = running.pop(future)
            try:
                result = future.result()
            except BrokenProcessPool:
                result = {"failed": "its process was killed or crashed before it was done", "seconds": 0.0}
                pools[ended.pool_index] = _new_pool()
            free_pools.append(ended.pool_index)
            yield Event(ended.number, result)


_of_process = ExitStack()
"""What a process of a pool has entered until it ends."""


def _new_pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"), initializer=_prepare_process)


def _prepare_process() -> None:
    """Prepare a process of a pool: it prints to standard error, and ends with the process that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started it
    os.dup2(2, 1)
    tqdm.set_lock(threading.RLock())  # tqdm's default is a semaphore, which a killed process leaves behind
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _of_process.enter_context(sharing_features(SharedFeatures(SHARED_FEATURES_BYTES)))


def _exit_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
