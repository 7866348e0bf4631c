# SPDX-License-Identifier: Apache-2.0
"""``make gpu``: parts run in order within their limits, results are written as they come, and all parts can be run."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS
from benchmarks.gpu import __main__ as program
from benchmarks.gpu import runner
from benchmarks.gpu.parts import PARTS, Part, Setting
from benchmarks.gpu.runner import missing_fashion_mnist, read_outcomes, required_modules, run_parts
from benchmarks.gpu.tables import BEGIN, END, page, write_into
from tests.comparisons import plan_of

ROOT = Path(__file__).parents[1]


def stub(name, code, seconds=60.0, **options):
    """A part that runs a line of Python, which finds the folder of results in ``out``."""

    def words(setting):
        return [sys.executable, "-c", f"import pathlib, sys, time; out = pathlib.Path({str(setting.output)!r}); {code}"]

    return Part(name, f"what {name} is for", seconds / 60, words, **{"imports": ()} | options)


def run(parts, folder, minutes=30.0):
    outcomes = run_parts(parts, Setting("cpu", quick=False, output=folder), minutes)
    return {outcome.name: outcome for outcome in outcomes}


@pytest.mark.slow
def test_parts_run_in_order_and_a_failed_one_is_noted_with_its_reason(tmp_path, capsys):
    parts = [
        stub("first", "(out / 'order').write_text('1'); print('hello')"),
        stub(
            "wrong", "(out / 'order').write_text((out / 'order').read_text() + '2'); raise ValueError('no such thing')"
        ),
        # Reads what is known by then, as whoever looks into the folder after a cut does.
        stub("last", "(out / 'copy.json').write_text((out / 'parts.json').read_text())"),
    ]
    outcomes = run(parts, tmp_path)
    assert [outcome.status for outcome in outcomes.values()] == ["done", "failed", "done"]
    assert "no such thing" in outcomes["wrong"].reason
    assert (tmp_path / "order").read_text() == "12"
    assert (tmp_path / "first.log").read_text() == "hello\n"
    known = json.loads((tmp_path / "copy.json").read_text())
    assert [(part["name"], part["status"]) for part in known["parts"]] == [("first", "done"), ("wrong", "failed")]
    assert known["machine"]["cores"]
    assert "no such thing" in capsys.readouterr().out


@pytest.mark.slow
def test_a_part_ends_at_its_limit_with_all_its_processes(tmp_path):
    """A process that it started, and that takes no notice of SIGTERM, ends as well; then the next part runs."""
    child = "import signal, time, sys; signal.signal(15, signal.SIG_IGN); print('begun', flush=True); time.sleep(600)"
    parts = [
        stub("long", f"import subprocess; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)", 3.0),
        stub("next", "pass"),
    ]
    began = time.monotonic()
    outcomes = run(parts, tmp_path)
    assert time.monotonic() - began < 30
    assert (outcomes["long"].status, outcomes["next"].status) == ("timed out", "done")
    assert "0.1 minutes" in outcomes["long"].reason
    assert (tmp_path / "long.log").read_text() == "begun\n"
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert "signal.signal(15, signal.SIG_IGN); print('begun'" not in listed


def test_what_is_done_is_left_out_and_the_rest_goes_on(tmp_path):
    count = "(out / '{}').open('a').write('x')"
    parts = [
        stub("done", count.format("done")),
        stub("broken", count.format("broken") + "; sys.exit(out.joinpath('mended').exists() is False)"),
    ]
    run(parts, tmp_path)
    (tmp_path / "mended").touch()
    outcomes = run(parts, tmp_path)
    assert [outcome.status for outcome in outcomes.values()] == ["done", "done"]
    assert ((tmp_path / "done").read_text(), (tmp_path / "broken").read_text()) == ("x", "xx")
    # Another command is another measurement.
    run([stub("done", count.format("done") + "; print('more')"), parts[1]], tmp_path)
    assert (tmp_path / "done").read_text() == "xx"


@pytest.mark.slow
def test_the_time_for_all_parts_is_kept(tmp_path, capsys):
    """What parts leave over is for the one that takes the rest, but for what later ones may take."""
    rest = stub("rest", "pass", 60.0, takes_rest=True)
    parts = [stub("short", "pass", 600.0), rest, stub("after", "pass", 120.0)]
    run(parts, tmp_path / "long", minutes=20.0)
    limits = [line.rpartition("at most ")[2] for line in capsys.readouterr().out.splitlines() if "at most" in line]
    assert limits == ["10.0 minutes)", "18.0 minutes)", "2.0 minutes)"]
    outcomes = run([stub("slow", "time.sleep(600)", 600.0), *parts], tmp_path / "none", minutes=0.05)
    assert [outcome.status for outcome in outcomes.values()] == ["timed out", "not run", "not run", "not run"]
    assert "time" in outcomes["after"].reason


def test_a_part_without_its_module_or_files_is_named_before_anything_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runner, "FASHION_MNIST_FOLDERS", (tmp_path,))
    parts = [
        stub("runs", "pass"),
        stub("without_module", "pass", needs=("no_such_module",)),
        stub("without_files", "pass", fashion_mnist=True),
        stub("not_imported", "pass", imports=("json", "benchmarks.no_such_module")),
    ]
    outcomes = run(parts, tmp_path / "out")
    assert [outcome.status for outcome in outcomes.values()] == ["done", "not run", "not run", "not run"]
    assert "no_such_module" in outcomes["without_module"].reason
    assert str(tmp_path) in outcomes["without_files"].reason
    assert "benchmarks.no_such_module" in outcomes["not_imported"].reason
    first_lines = capsys.readouterr().out.splitlines()[:3]
    for name, line in zip(("without_module", "without_files", "not_imported"), first_lines, strict=True):
        assert name in line


@pytest.mark.parametrize("below", ["", "FashionMNIST/raw"])
def test_a_folder_of_fashion_mnist_is_found(tmp_path, below):
    folder = tmp_path / below
    folder.mkdir(parents=True, exist_ok=True)
    for name in runner.FASHION_MNIST_FILES[1:]:
        (folder / f"{name}.gz").touch()
    assert len(missing_fashion_mnist(tmp_path)) == 1
    (folder / runner.FASHION_MNIST_FILES[0]).touch()
    assert missing_fashion_mnist(tmp_path) == []


def test_modules_are_those_of_the_dependencies():
    modules = required_modules()
    assert {"torch", "pytorch_lightning", "PIL", "yaml", "jsonargparse", "timm"} <= set(modules)
    assert runner.missing_dependencies() == []


@pytest.mark.slow
def test_an_interrupt_is_noted_and_goes_on(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    parts = [stub("first", "pass"), stub("second", "pass")]
    run(parts[:1], tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "run_part", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(parts, tmp_path)
    assert [outcome.status for outcome in read_outcomes(tmp_path).values()] == ["done", "interrupted"]
    assert run(parts, tmp_path)["second"].status == "done"


@pytest.mark.slow
def test_tables_are_made_of_what_is_there(tmp_path):
    """A benchmark's rows, the tests that a cut-off log names, and the seeds that all methods of a comparison have."""
    parts = [stub(name, "pass") for name in ("tests", "rounds", "methods", "never")]
    run(parts[:3], tmp_path)
    (tmp_path / "tests.log").write_text("tests/a.py::b[c] PASSED [ 5%]\ntests/a.py::d FAILED [10%]\ntests/a.py::e ")
    rows = [{"benchmark": "rounds", "precision": "tf32", "perada / limit": 1.23456, "seconds": {}, "torch": "2"}]
    (tmp_path / "rounds.json").write_text(json.dumps(rows))
    common = {"stage": "run", "recipe": "r", "varied": {}, "point": {}, "personal/local_test": 0.5, "diverged": False}
    common |= {"personal/global_test": 0.25, "global/global_test": 0.125, "num_clients": 2, "seconds_per_round": 1.0}
    common |= {"variant": [], "params/trained": 1, "params/sent": 1, "mb_sent": 1.0, "full/params": 2, "full/mb": 2.0}
    runs = [("fedavg", 0), ("ditto", 0), ("fedavg", 1)]
    (tmp_path / "methods.json").write_text(json.dumps([common | {"label": name, "seed": seed} for name, seed in runs]))
    text = page(parts, tmp_path)
    assert "1 passed, 1 failed, 0 error, 0 skipped.\n- `tests/a.py::d`" in text
    assert "| precision | perada / limit |\n| --- | --- |\n| tf32 | 1.235 |" in text
    assert "Seeds of all methods: 0." in text
    assert "| ditto " in text
    (tmp_path / "methods.json").write_text("[{")
    assert "**methods**: what methods is for\n\n`methods.json` cannot be shown: JSONDecodeError" in page(
        parts, tmp_path
    )
    assert "| `never` | what never is for | not run | 0 | not reached |" in text

    document = tmp_path / "page.md"
    document.write_text(f"above\n{BEGIN}\nold\n{END}\nbelow\n")
    write_into(document, text)
    content = document.read_text()
    assert content.startswith("above\n") and content.endswith("below\n")
    assert text in content and "old" not in content
    document.write_text("no marks")
    with pytest.raises(ValueError, match="must have the lines"):
        write_into(document, text)


def test_the_parts_take_half_an_hour_and_begin_with_the_tests():
    assert sum(part.minutes for part in PARTS) <= 30
    names = [part.name for part in PARTS]
    assert len(set(names)) == len(names)
    # Tests of correctness come first, and comparisons, which take whatever time is left, come last.
    assert names[0] == "cuda_tests"
    first_comparison = names.index("hospitals_lite0")
    assert all(name.startswith("hospitals_lite0") for name in names[first_comparison:])


@pytest.mark.every(4)
@pytest.mark.parametrize("quick", [False, True], ids=["full", "quick"])
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_the_command_of_each_part_can_be_parsed(part, quick, tmp_path, monkeypatch):
    setting = Setting("cpu", quick, tmp_path, tmp_path / "images")
    python, *words = part.command(setting)
    assert python == sys.executable
    module = words[words.index("-m") + 1]
    rest = words[words.index("-m") + 2 :]
    if module == "pytest":
        assert (ROOT / rest[-1]).is_file()
    elif module == "benchmarks":
        assert rest[0] in BENCHMARKS
        assert (BENCHMARKS[rest[0]], "--quick" in rest) == (BENCHMARKS[part.name], quick)
        assert rest[rest.index("--output") + 1] == str(tmp_path / f"{part.name}.json")
    else:
        assert rest[0] == "compare"
        plan = plan_of(monkeypatch, *rest[1:])
        assert len(plan.rows) == {"hospitals_lite0": 2 if quick else 8, "hospitals_lite0_8_of_20": 1}[part.name]
        assert plan.seeds == ([0] if quick else [0, 1, 2])
        for row in plan.rows:
            cli = plan.make_cli(plan.job(row, 0, "run", {}).args)
            assert cli.datamodule.division.dataset.dataset.root == str(tmp_path / "images")
            assert cli.loop.clients_per_round == (8 if "8_of_20" in part.name else None)
            assert cli.trainer.max_epochs == (1 if quick else 60)
            assert cli.model.adapter == "residual"
            assert len(cli.datamodule.division.dataset.names) == 20


def test_on_a_gpu_nothing_runs_on_the_cpu(tmp_path):
    for part in PARTS[1:]:
        words = part.command(Setting("cuda", False, tmp_path))
        assert ("cuda" in words) != ("--trainer.accelerator=gpu" in words), part.name


def test_the_dry_run_starts_the_quick_form_of_every_part(tmp_path, monkeypatch, capsys):
    started = []

    def record(part, words, setting, limit):
        started.append(tuple(words))
        return runner.Outcome(part.name, "done", "", 1.0, tuple(words[1:]))

    monkeypatch.setattr(runner, "run_part", record)
    monkeypatch.setattr(runner, "missing_for", lambda parts, _: {part.name: [] for part in parts})
    output = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--quick", "--output", str(output)])
    program.main()
    setting = Setting("cpu", True, output)
    assert started == [tuple(part.command(setting)) for part in PARTS]
    assert (output / "tables.md").is_file()
    assert str(output / "tables.md") in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_fashion_mnist(None)), reason="no Fashion-MNIST")
def test_the_dry_run_passes(tmp_path):
    ended = subprocess.run(
        ["make", "gpu", "DEVICE=cpu", "QUICK=1", f"OUTPUT={tmp_path}", f"PYTHON={sys.executable}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [outcome.status for outcome in read_outcomes(tmp_path).values()] == ["done"] * len(PARTS)
