# SPDX-License-Identifier: Apache-2.0
"""A round that is begun is counted, whatever becomes of it: its noise has been drawn, and after a crash others."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import warnings
from collections import Counter
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import TensorDataset

import perada
from perada.privacy import clipping, history_epsilon
from perada.privacy.journal import JOURNAL, Journal, head_file, read_journals
from tests.options import sections

PIXELS = 16
CLASSES = 3
SIGMA = 6.0
CLIENTS = 3
DELTA = 1e-3
LEVELS = {
    "images": {"privacy": {"noise_multiplier": SIGMA, "delta": DELTA}},
    "clients": {"client_privacy": {"noise_multiplier": SIGMA, "delta": DELTA}},
}
RESUMED = "ignore:(client_)?privacy. round .* was already begun once:UserWarning"


pytestmark = pytest.mark.usefixtures("quick_epsilon")


def federation(clients=CLIENTS):
    random = torch.Generator().manual_seed(0)
    part = TensorDataset(torch.randn(8, 1, 1, PIXELS, generator=random), torch.arange(8) % CLASSES)
    return perada.FederatedData([part] * clients, [part] * clients, TensorDataset(part.tensors[0] + 1))


def fit(root, rounds=3, callbacks=(), ckpt_path=None, **options):
    layer = nn.Linear(PIXELS, CLASSES, bias=False)
    nn.init.zeros_(layer.weight)
    common = {"adapter": "full", "algorithm": "perada_no_kd", "batch_size": "full", "lr_local": 0.1, "local_steps": 1}
    common |= {"accelerator": "cpu", "enable_progress_bar": False, "default_root_dir": str(root)}
    network = nn.Sequential(nn.Flatten(), layer)
    given = {"callbacks": list(callbacks), "ckpt_path": ckpt_path}
    return perada.finetune(network, federation(), **sections(rounds=rounds, **common | given | options))


def checkpoints(root, version=0):
    return Path(root) / "lightning_logs" / f"version_{version}" / "checkpoints"


class Crash(pl.Callback):
    """Raises in a round: after it was opened, after its local step, or after it was closed."""

    def __init__(self, round, when):
        self.round = round
        self.when = when

    def _at(self, trainer, when):
        if (trainer.current_epoch, self.when) == (self.round, when) and trainer.state.fn == "fit":
            raise RuntimeError("crashed")

    def on_train_epoch_start(self, trainer, pl_module):
        self._at(trainer, "opened")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._at(trainer, "trained")

    def on_validation_start(self, trainer, pl_module):
        self._at(trainer, "closed")


class Saves(pl.Callback):
    """Writes a checkpoint each time that ``hook`` is called."""

    def __init__(self, path, hook="on_train_epoch_end"):
        self.path = str(path)
        setattr(self, hook, lambda trainer, *_: trainer.save_checkpoint(self.path))


class Draws:
    """Counts the noisy rows that were drawn: one a client, role and step, or one a client and round."""

    def __init__(self, monkeypatch):
        self.rows, real = 0, clipping.secure_noise

        def counted(like):
            self.rows += 1
            return real(like)

        monkeypatch.setattr(clipping, "secure_noise", counted)


def crashed(root, when, round=1, callbacks=(), **options):
    with pytest.raises(RuntimeError, match="crashed"):
        fit(root, callbacks=[*callbacks, Crash(round, when)], **options)


def epsilon(steps):
    return history_epsilon({(SIGMA, 1.0): steps}, DELTA)


def spent_epsilon(run, level):
    record = run.info["privacy"]
    return record["sample"]["release"] if level == "images" else record["client"]["epsilon"]


def per_round(level):
    return 2 if level == "images" else 1  # personal and local


@pytest.mark.every(3)
@pytest.mark.parametrize("when", ["opened", "trained", "closed"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_round_that_crashed_is_counted_with_the_one_in_its_place(tmp_path, monkeypatch, level, when):
    """At least what was drawn: noise of a round that was opened and not trained is counted too."""
    drawn = Draws(monkeypatch)
    crashed(tmp_path, when, **LEVELS[level])
    last = str(checkpoints(tmp_path) / "last.ckpt")
    with pytest.warns(UserWarning, match=r"round 2 .*already begun"):
        run = fit(tmp_path, ckpt_path=last, **LEVELS[level])
    assert [record["round"] for record in run.metrics["rounds"]] == [0, 1, 2]
    assert spent_epsilon(run, level) == pytest.approx([epsilon(4 * per_round(level))] * CLIENTS, rel=1e-9)
    assert 3 * per_round(level) <= drawn.rows / CLIENTS <= 4 * per_round(level)
    assert (drawn.rows / CLIENTS == 4 * per_round(level)) == (when != "opened")


@pytest.mark.slow
@pytest.mark.filterwarnings(RESUMED)
@pytest.mark.parametrize("level", LEVELS)
def test_every_crash_counts_once_more(tmp_path, level):
    """Also where a resumed run crashed before its first checkpoint, and the next one begins at the same."""
    crashed(tmp_path, "closed", **LEVELS[level])
    last = str(checkpoints(tmp_path) / "last.ckpt")
    for times in (1, 2):
        crashed(tmp_path, "closed", ckpt_path=last, **LEVELS[level])
        assert not (checkpoints(tmp_path, times) / "last.ckpt").exists()
    run = fit(tmp_path, ckpt_path=last, **LEVELS[level])
    assert spent_epsilon(run, level) == pytest.approx([epsilon(6 * per_round(level))] * CLIENTS, rel=1e-9)


@pytest.mark.slow
@pytest.mark.filterwarnings(RESUMED)
def test_branches_from_one_checkpoint_know_of_each_other(tmp_path):
    """All of their noise was drawn for the same images. An evaluation of the checkpoint is of the checkpoint alone."""
    options = LEVELS["images"]
    fit(tmp_path, 1, **options)
    first = str(checkpoints(tmp_path) / "last.ckpt")
    one = fit(tmp_path, 2, ckpt_path=first, **options)
    assert spent_epsilon(one, "images") == pytest.approx([epsilon(4)] * CLIENTS)
    two = fit(tmp_path, 3, ckpt_path=first, **options)
    assert spent_epsilon(two, "images") == pytest.approx([epsilon(2 * 4)] * CLIENTS)
    # The second branch's checkpoint holds the first branch's round already.
    three = fit(tmp_path, 4, ckpt_path=str(checkpoints(tmp_path, 2) / "last.ckpt"), **options)
    assert spent_epsilon(three, "images") == pytest.approx([epsilon(2 * 5)] * CLIENTS)
    # The first one's knows of what came after it.
    four = fit(tmp_path, 3, ckpt_path=str(checkpoints(tmp_path, 1) / "last.ckpt"), **options)
    assert spent_epsilon(four, "images") == pytest.approx([epsilon(2 * 6)] * CLIENTS)
    assert spent_epsilon(fit(tmp_path, 1, ckpt_path=first, **options), "images") == pytest.approx(
        [epsilon(2 * 6)] * CLIENTS
    )


@pytest.mark.slow
def test_after_sigkill_the_round_is_on_disk(tmp_path):
    script = """
        import os, signal, sys
        from importlib import import_module
        sys.path.insert(0, sys.argv[1])
        tests = import_module("tests.privacy.test_begun_rounds")

        class Kill(tests.pl.Callback):
            def on_validation_start(self, trainer, pl_module):
                if trainer.current_epoch == 1:
                    os.kill(os.getpid(), signal.SIGKILL)

        tests.fit(sys.argv[2], callbacks=[Kill()], **tests.LEVELS["images"])
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script), Path(__file__).parents[2], tmp_path]
    killed = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    with pytest.warns(UserWarning, match=r"round 2 .*already begun"):
        run = fit(tmp_path, ckpt_path=str(checkpoints(tmp_path) / "last.ckpt"), **LEVELS["images"])
    assert spent_epsilon(run, "images") == pytest.approx([epsilon(8)] * CLIENTS)


@pytest.mark.every(2)
@pytest.mark.filterwarnings(RESUMED)
@pytest.mark.parametrize("level", LEVELS)
def test_a_target_is_kept_through_a_crash(tmp_path, level):
    """There is then no room for the last round, and the run ends without it, its fine-tuning and scores done."""
    target = {name: {"target_epsilon": 4.0, "delta": DELTA} for name in LEVELS[level]}
    crashed(tmp_path, "closed", **target)
    last = str(checkpoints(tmp_path) / "last.ckpt")
    run = fit(tmp_path, ckpt_path=last, **target)
    assert [record["round"] for record in run.metrics["rounds"]] == [0, 1]
    assert max(spent_epsilon(run, level)) <= 4.0
    assert min(spent_epsilon(run, level)) >= 3.99
    assert len(run.metrics["clients"]["personal/local_test"]) == CLIENTS
    # And once more: there is no room left at all.
    with pytest.warns(UserWarning, match="after 1 rounds"):
        again = fit(tmp_path, ckpt_path=last, **target)
    assert [record["round"] for record in again.metrics["rounds"]] == [0]
    assert max(spent_epsilon(again, level)) <= 4.0
    assert len(again.metrics["clients"]["personal/local_test"]) == CLIENTS
    # What the crash cost does not look like another plan: the ended run can be resumed, and evaluated.
    ended = str(checkpoints(tmp_path, 1) / "last.ckpt")
    with pytest.warns(UserWarning, match="after 2 rounds"):
        once_more = fit(tmp_path, ckpt_path=ended, **target)
    assert spent_epsilon(once_more, level) == spent_epsilon(run, level)
    with pytest.raises(ValueError, match=r"target_epsilon=4\.0 .*different plan"):
        fit(tmp_path, 6, ckpt_path=ended, **target)


@pytest.mark.every(2)
@pytest.mark.parametrize("level", LEVELS)
def test_a_calibrated_run_is_not_resumed_for_more_rounds(tmp_path, level):
    target = {name: {"target_epsilon": 2.0, "delta": DELTA} for name in LEVELS[level]}
    section, expected = ("privacy", 2) if level == "images" else ("client_privacy", 1)
    first = fit(tmp_path, 2, **target)
    last = str(checkpoints(tmp_path) / "last.ckpt")
    with pytest.raises(ValueError, match=rf"{section}: .*target_epsilon=2\.0") as error:
        fit(tmp_path, 20, ckpt_path=last, **target)
    assert "\n" not in str(error.value)
    higher = {name: options | {"target_epsilon": 9.0} for name, options in target.items()}
    run = fit(tmp_path, 4, ckpt_path=last, **higher)  # with the noise that it has
    record = [one.info["privacy"]["sample" if level == "images" else "client"] for one in (first, run)]
    noise = [one.get("noise_multiplier") or one["noise_multipliers"][0] for one in record]
    assert noise[0] == noise[1]
    rounds = history_epsilon({(noise[0], 1.0): 4 * expected}, DELTA)
    assert spent_epsilon(run, level) == pytest.approx([rounds] * CLIENTS)


def test_a_budget_that_is_spent_ends_the_run_and_its_resumption(tmp_path, monkeypatch):
    """Killed after its last round: resumed, it has nothing to train, and ends as if it had not been killed."""
    monkeypatch.chdir(tmp_path)
    limit = {"privacy": {"noise_multiplier": SIGMA, "delta": DELTA, "max_epsilon": epsilon(4) + 0.01}}
    with pytest.warns(UserWarning, match="no longer"):
        uninterrupted = fit(tmp_path, 9, **limit)
    assert len(uninterrupted.metrics["rounds"]) == 2
    with pytest.warns(UserWarning, match="after 2 rounds"):
        again = fit(tmp_path, 9, ckpt_path="last", **limit)
    assert again.metrics == uninterrupted.metrics
    with pytest.warns(UserWarning, match="after 2 rounds"):
        third = fit(tmp_path, 9, ckpt_path=str(checkpoints(tmp_path, 1) / "last.ckpt"), **limit)
    assert third.metrics == uninterrupted.metrics
    longer = fit(tmp_path, 3, ckpt_path="last", privacy=limit["privacy"] | {"max_epsilon": 99.0})
    assert [record["round"] for record in longer.metrics["rounds"]] == [0, 1, 2]


@pytest.mark.slow
def test_in_the_test_mode_a_round_is_counted_once_since_its_noise_is_the_same(tmp_path):
    options = {"privacy": LEVELS["images"]["privacy"] | {"secure_rng": False}}
    uninterrupted = fit(tmp_path / "whole", **options)
    crashed(tmp_path, "closed", **options)
    run = fit(tmp_path, ckpt_path=str(checkpoints(tmp_path) / "last.ckpt"), **options)
    assert run.metrics == uninterrupted.metrics
    assert not (checkpoints(tmp_path) / JOURNAL).exists()
    within = Saves(tmp_path / "within.ckpt", "on_train_batch_start")
    crashed(tmp_path, "trained", callbacks=[within], **options)
    run = fit(tmp_path, ckpt_path=within.path, **options)
    assert run.metrics == uninterrupted.metrics


def test_nothing_is_drawn_that_cannot_be_written_down(tmp_path, monkeypatch):
    drawn = Draws(monkeypatch)

    def full(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"privacy_ledger\.jsonl' .*no space left.* not begun"):
        fit(tmp_path, **LEVELS["images"])
    assert drawn.rows == 0


def test_the_journal_says_what_a_round_cost_before_it_is_trained(tmp_path):
    seen = []

    class Reader(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            seen.append((checkpoints(tmp_path) / JOURNAL).read_text().splitlines())

    fit(tmp_path, 2, callbacks=[Reader()], **LEVELS["images"])
    assert [len(lines) for lines in seen] == [1, 2]
    entry = json.loads(seen[1][1])
    assert entry["round"] == 1
    rows = Counter(tuple(row) for row in entry["images"])
    expected = [(client, SIGMA, 1.0, 1, sent) for client in range(CLIENTS) for sent in (False, True)]
    assert rows == Counter(expected)


def entry(name, run="a", round=0):
    return {"id": name, "run": run, "round": round, "images": [], "clients": []}


def test_a_line_that_was_cut_off_is_left_out_and_the_next_one_is_whole(tmp_path):
    path = tmp_path / "a" / JOURNAL
    Journal([path]).write(entry("one"))
    with path.open("ab") as file:
        file.write(b'{"id": "two", "rou')
    Journal([path], [path]).write(entry("three"))
    assert list(read_journals([path, tmp_path / "missing"], "a")) == ["one", "three"]
    assert len(path.read_text().splitlines()) == 3


def test_the_name_of_a_new_journal_is_on_the_disk_with_its_first_line(tmp_path, monkeypatch):
    """A power failure could else take the file with the rounds that were begun."""
    synced = []
    real = os.fsync

    def fsync(file):
        synced.append(os.fstat(file).st_ino)
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    Journal([tmp_path / "a" / JOURNAL]).write(entry("one"))
    journal = (tmp_path / "a" / JOURNAL).stat().st_ino
    folder = (tmp_path / "a").stat().st_ino
    # The head, which is written before the journal and after it, is synced with the folder each time.
    assert folder in synced[synced.index(journal) + 1 :]


@pytest.mark.slow
def test_entries_of_other_runs_in_the_same_file_are_left_out(tmp_path):
    path = tmp_path / JOURNAL
    for name, run in (("one", "a"), ("two", "b"), ("three", "a")):
        Journal([path]).write(entry(name, run))
    assert list(read_journals([path], "a")) == ["one", "three"]


@pytest.mark.parametrize(
    "line", [b'{"id": "two", "rou#d": 1}', b'{"id": "two"}', b"[1, 2]", b'"}', b'{"id": "two", "rouXXXX', b"\0" * 9]
)
def test_a_damaged_line_is_not_taken_for_a_round_that_was_never_begun(tmp_path, line):
    path = tmp_path / JOURNAL
    Journal([path]).write(entry("one"))
    with path.open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(ValueError, match=r"line 2 of '.*privacy_ledger\.jsonl'"):
        read_journals([path], "a")


def kept_lines(path, keep):
    """Write a journal of four lines, and replace it by some of them."""
    for name in ("one", "two", "three", "four"):
        Journal([path]).write(entry(name))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[index] for index in keep))


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ([1, 2, 3], "a line of .* before line 1 was removed"),
        ([0, 2, 3], "a line of .* before line 2 was removed"),
        ([0, 3], "a line of .* before line 2 was removed"),
        ([0, 2, 1, 3], "a line of .* before line 2 was removed"),
        ([0, 1, 1, 2, 3], "a line of .* before line 3 was removed"),
        ([0, 1, 2], r"privacy_ledger\.jsonl' lacks its last line"),
        ([0], r"privacy_ledger\.jsonl' lacks its last line"),
        ([], r"privacy_ledger\.jsonl' lacks its last line"),
    ],
)
def test_lines_that_were_removed_or_moved_are_noticed(tmp_path, keep, message):
    path = tmp_path / JOURNAL
    kept_lines(path, keep)
    with pytest.raises(ValueError, match=message):
        read_journals([path], "a")


def test_changed_and_hidden_lines_and_a_removed_head_are_noticed(tmp_path):
    path = tmp_path / JOURNAL
    kept_lines(path, range(4))
    content = path.read_bytes()
    assert list(read_journals([path], "a")) == ["one", "two", "three", "four"]
    for changed in (
        content.replace(b'"round": 0', b'"round": 1', 1),
        content[:-1] + b" #cut\n",
        content.replace(b"}\n", b"} #cut\n", 1),
    ):
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=r"was removed or changed|lacks its last line"):
            read_journals([path], "a")
    path.write_bytes(content)
    head_file(path).unlink()
    with pytest.raises(ValueError, match=r"privacy_ledger\.head' is missing"):
        read_journals([path], "a")


def test_a_crash_between_journal_and_head_is_healed(tmp_path, monkeypatch):
    path = tmp_path / JOURNAL
    Journal([path]).write(entry("one"))
    before = head_file(path).read_bytes()
    Journal([path]).write(entry("two"))
    head_file(path).write_bytes(before)
    assert list(read_journals([path], "a")) == ["one", "two"]
    Journal([path]).write(entry("three"))
    assert list(read_journals([path], "a")) == ["one", "two", "three"]
    assert head_file(path).read_bytes() != before
    empty = tmp_path / "empty" / JOURNAL
    monkeypatch.setattr("os.fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "no space left")))
    with pytest.raises(OSError, match="no space left"):
        Journal([empty]).write(entry("one"))
    assert read_journals([empty], "a") == {}


def test_a_link_is_neither_read_nor_written(tmp_path):
    other = tmp_path / "other"
    path = tmp_path / JOURNAL
    Journal([other]).write(entry("one"))
    path.symlink_to(other)
    before = other.read_text()
    assert read_journals([path], "a") == {}
    with pytest.raises(OSError, match="cannot be recorded"):
        Journal([path]).write(entry("two"))
    assert other.read_text() == before


@pytest.mark.slow
def test_a_folder_of_an_earlier_run_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    blocked = tmp_path / "file" / JOURNAL
    with pytest.warns(UserWarning, match=f"{re.escape(str(blocked))}'"):
        Journal([tmp_path / JOURNAL], [blocked]).write(entry("one"))
    assert list(read_journals([tmp_path / JOURNAL], "a")) == ["one"]


@pytest.mark.every(2)
@pytest.mark.parametrize("loss", ["deleted", "left behind", "shortened"])
def test_without_the_journal_of_a_run_it_is_not_resumed(tmp_path, loss):
    """Rounds that were begun after the checkpoint would be missing."""
    crashed(tmp_path / "run", "closed", 2, **LEVELS["images"])
    path = checkpoints(tmp_path / "run") / JOURNAL
    newest = checkpoints(tmp_path / "run") / "last.ckpt"
    if loss == "deleted":
        path.unlink()
    elif loss == "shortened":
        path.write_text(path.read_text().splitlines()[0] + "\n")
        head_file(path).write_text(hashlib.sha256(path.read_bytes()).hexdigest())
    else:
        newest = newest.rename(tmp_path / "alone.ckpt")
        (tmp_path / "run").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"privacy_ledger\.jsonl is missing"):
        fit(tmp_path, ckpt_path=str(newest), **LEVELS["images"])
    if loss == "left behind":
        moved = checkpoints(tmp_path / "elsewhere") / JOURNAL
        moved.rename(tmp_path / JOURNAL)
        with pytest.raises(ValueError, match=r"privacy_ledger\.head' is missing"):
            fit(tmp_path, ckpt_path=str(newest), **LEVELS["images"])
        head_file(moved).rename(head_file(tmp_path / JOURNAL))
        with pytest.warns(UserWarning, match=r"round 3 .*already begun"):
            run = fit(tmp_path, ckpt_path=str(newest), **LEVELS["images"])
        assert spent_epsilon(run, "images") == pytest.approx([epsilon(2 * 4)] * CLIENTS)


@pytest.mark.every(2)
@pytest.mark.parametrize("level", LEVELS)
def test_checkpoints_of_ones_own_have_a_journal_too(tmp_path, level):
    options = {"enable_checkpointing": False, "logger": False} | LEVELS[level]
    with pytest.raises(RuntimeError, match="crashed"):
        fit(tmp_path, callbacks=[Saves(tmp_path / "mine.ckpt"), Crash(2, "opened")], **options)
    with pytest.warns(UserWarning, match=r"round 3 .*already begun"):
        run = fit(tmp_path, ckpt_path=str(tmp_path / "mine.ckpt"), **options)
    assert spent_epsilon(run, level) == pytest.approx([epsilon(per_round(level) * 4)] * CLIENTS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.ckpt", "privacy_ledger.head", JOURNAL]


@pytest.mark.slow
def test_a_checkpoint_of_a_run_that_is_over_needs_no_journal(tmp_path):
    fit(tmp_path, 2, callbacks=[Saves(tmp_path / "mine.ckpt")], enable_checkpointing=False, **LEVELS["images"])
    path = tmp_path / JOURNAL
    before = path.read_text().splitlines()
    assert [json.loads(line)["round"] for line in before] == [1, 1]  # when it was begun, and its only round
    quiet = {"enable_checkpointing": False, "logger": False} | LEVELS["images"]
    fit(tmp_path, 1, callbacks=[Saves(tmp_path / "once.ckpt")], **quiet)
    assert path.read_text().splitlines() == before


def test_where_one_of_two_levels_is_in_the_test_mode_the_other_draws_anew(tmp_path):
    both = LEVELS["images"] | {"client_privacy": LEVELS["clients"]["client_privacy"] | {"secure_rng": False}}
    crashed(tmp_path, "closed", **both)
    with pytest.warns(UserWarning, match=r"round 2 .*already begun"):
        run = fit(tmp_path, ckpt_path=str(checkpoints(tmp_path) / "last.ckpt"), **both)
    assert spent_epsilon(run, "images") == pytest.approx([epsilon(2 * 4)] * CLIENTS)


def test_a_round_is_counted_with_the_noise_that_it_had(tmp_path):
    """It crashed with σ = 6 and is resumed with 12."""
    crashed(tmp_path, "opened", **LEVELS["clients"])
    other = {"client_privacy": LEVELS["clients"]["client_privacy"] | {"noise_multiplier": 2 * SIGMA}}
    with pytest.warns(UserWarning, match=r"round 2 .*already begun"):
        run = fit(tmp_path, ckpt_path=str(checkpoints(tmp_path) / "last.ckpt"), **other)
    expected = history_epsilon({(SIGMA, 1.0): 2, (2 * SIGMA, 1.0): 2}, DELTA)
    assert spent_epsilon(run, "clients") == pytest.approx([expected] * CLIENTS)


@pytest.mark.slow
def test_two_runs_that_write_into_one_folder_do_not_count_each_others_rounds(tmp_path):
    def one(callbacks=(), **options):
        saving = [ModelCheckpoint(tmp_path / "both", "last", enable_version_counter=False), *callbacks]
        return fit(tmp_path, callbacks=saving, **LEVELS["images"] | options)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty", UserWarning)
        one(rounds=2)
        with pytest.raises(RuntimeError, match="crashed"):
            one([Crash(1, "opened")])
        with pytest.warns(UserWarning, match=r"round 2 .*already begun"):
            run = one(ckpt_path=str(tmp_path / "both" / "last.ckpt"))
    assert spent_epsilon(run, "images") == pytest.approx([epsilon(2 * 4)] * CLIENTS)


@pytest.mark.filterwarnings(RESUMED)
@pytest.mark.parametrize("moved", [True, False])
@pytest.mark.slow
def test_branches_know_of_each_other_where_they_are_moved_together(tmp_path, moved):
    """B and D are resumed from A, and D's round is in the journals of A and D."""
    root = tmp_path / "before"
    options = LEVELS["images"]
    fit(root, 1, **options)
    start = str(checkpoints(root) / "last.ckpt")
    fit(root, 2, ckpt_path=start, **options)
    crashed(root, "closed", ckpt_path=start, **options)
    if moved:
        root = root.rename(tmp_path / "after")
    else:
        shutil.rmtree(root / "lightning_logs" / "version_0")
    path = str(checkpoints(root, 1) / "last.ckpt")
    if moved:
        with pytest.warns(UserWarning, match=r"round 2 .*already begun"):
            run = fit(root, 3, ckpt_path=path, **options)
        assert spent_epsilon(run, "images") == pytest.approx([epsilon(2 * 4)] * CLIENTS)
    else:
        with pytest.warns(
            UserWarning,
            match=r"privacy_ledger\.jsonl' is missing",
        ):
            fit(root, 3, ckpt_path=path, **options)


def test_in_the_test_mode_a_round_with_other_noise_is_counted_once_more(tmp_path):
    def options(sigma):
        return {"privacy": {"noise_multiplier": sigma, "delta": DELTA, "secure_rng": False}}

    within = Saves(tmp_path / "within.ckpt", "on_train_batch_start")
    crashed(tmp_path, "trained", 0, callbacks=[within], **options(4.0))
    run = fit(tmp_path, 1, ckpt_path=within.path, **options(0.5))
    assert spent_epsilon(run, "images") == pytest.approx(
        [history_epsilon({(4.0, 1.0): 2, (0.5, 1.0): 2}, DELTA)] * CLIENTS
    )


def test_an_id_that_perada_did_not_write_is_not_written_into_a_journal(tmp_path):
    fit(tmp_path, 1, **LEVELS["images"])
    path = checkpoints(tmp_path) / "last.ckpt"
    saved = torch.load(path, weights_only=True)
    saved["perada"]["federation"]["privacy"]["run"] = "$(touch owned)"
    torch.save(saved, path)
    with pytest.raises(ValueError, match="private run's id"):
        fit(tmp_path, 2, ckpt_path=str(path), **LEVELS["images"])


@pytest.mark.parametrize("name", ["notes.txt", JOURNAL])
def test_a_strangers_checkpoint_does_not_have_anything_written_to_other_files(tmp_path, name):
    fit(tmp_path, 1, **LEVELS["images"])
    path = checkpoints(tmp_path) / "last.ckpt"
    target = tmp_path / "home" / name
    saved = torch.load(path, weights_only=True)
    target.parent.mkdir()
    target.write_text("mine\n" if name != JOURNAL else "{mine}\n")
    saved["perada"]["federation"]["privacy"]["journals"].append(str(target))
    torch.save(saved, path)
    before = target.read_text()
    if name == JOURNAL:
        with pytest.raises(ValueError, match="line 1 of"):
            fit(tmp_path, 2, ckpt_path=str(path), **LEVELS["images"])
    else:
        with pytest.warns(UserWarning, match="is missing, the journal"):
            fit(tmp_path, 2, ckpt_path=str(path), **LEVELS["images"])
    assert target.read_text() == before


def test_without_privacy_there_is_no_journal(tmp_path):
    fit(tmp_path, 1)
    assert not (checkpoints(tmp_path) / JOURNAL).exists()


@pytest.fixture
def _unnoticed_at_set_up(monkeypatch):
    """Clients break by images that become NaN later: those that are so at set-up are rejected there."""
    monkeypatch.setattr("perada.data.broken_images._find_broken", lambda *_: {})


@pytest.mark.every(2)
@pytest.mark.usefixtures("_unnoticed_at_set_up")
@pytest.mark.filterwarnings("ignore:round .. the loss of client 1 became NaN or infinite:UserWarning")
@pytest.mark.parametrize("level", LEVELS)
def test_a_client_that_breaks_is_counted_like_the_others(tmp_path, level):
    """Whether it breaks depends on its images, and the noise that it draws is no less."""
    data = federation()
    data.train[1] = TensorDataset(torch.full((8, 1, 1, PIXELS), torch.nan), data.train[1].tensors[1])
    options = {"adapter": "full", "algorithm": "fedavg", "batch_size": "full", "local_steps": 1, "rounds": 2}
    options |= {"accelerator": "cpu", "enable_progress_bar": False, "logger": False}
    network = nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, CLASSES))
    run = perada.finetune(network, data, **sections(**options, **LEVELS[level]))
    assert spent_epsilon(run, level) == pytest.approx([epsilon(2)] * CLIENTS)
    assert all(value.isfinite().all() for value in run.state("global").values())


@pytest.mark.filterwarnings("ignore:round 1. the loss of client 0, 1, 2 became NaN:UserWarning")
@pytest.mark.usefixtures("_unnoticed_at_set_up")
def test_a_round_in_which_every_client_breaks_is_one_of_noise(monkeypatch):
    """That nobody counts would be seen in a global state that stays as it was; the run would end in an error."""
    monkeypatch.setattr("perada.lightning.federated_loop.check_failures", lambda *_, **__: None)
    data = federation()
    data.train[:] = [TensorDataset(torch.full_like(one.tensors[0], torch.nan), one.tensors[1]) for one in data.train]
    options = {"adapter": "full", "algorithm": "fedavg", "batch_size": "full", "local_steps": 1}
    options |= {"accelerator": "cpu", "enable_progress_bar": False, "logger": False}
    network = nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, CLASSES))
    before, after = (
        perada.finetune(network, data, **sections(rounds=rounds, **options, **LEVELS["clients"])).state("global")
        for rounds in (0, 1)
    )
    assert all(value.isfinite().all() for value in after.values())
    assert not any(torch.equal(value, before[key]) for key, value in after.items())
