# SPDX-License-Identifier: Apache-2.0
"""The command that exports a finished run."""

import warnings
from pathlib import Path
from typing import Literal

import yaml
from jsonargparse import ArgumentParser

from perada.cli.inference import export_one, open_run
from perada.cli.runs import make_cli
from perada.lightning.checkpoint import newest_whole
from perada.lightning.outcome import outcome
from perada.lightning.restore import lacks_info
from perada.lightning.untrusted import plain_data
from perada.results.joined import check_none_lost, joined_clients
from perada.results.privacy_card import privacy_lines
from perada.results.run import Run
from perada.results.run_file import RUN_FILE


def export(parser: ArgumentParser, words: list[str]) -> None:
    """Write a finished run's adapters as PEFT folders, or one of its models in another format."""
    parser.add_argument("run", type=Path, help="Run folder, for example lightning_logs/version_0.")
    parser.add_argument("--output", type=Path, required=True, help="Folder for client_0, client_1, … and global.")
    forms = Literal["peft", "onnx", "safetensors", "torch-export"]
    parser.add_argument("--format", type=forms, default="peft", help="All but peft: one model, also of a saved run.")
    parser.add_argument("--client", help="Name or number of a client, of which alone the model is written.")
    given = parser.parse_args(words)
    if given.output.is_file():
        raise NotADirectoryError(f"--output={given.output} is a file; give a folder")
    if given.format != "peft":
        export_one(given.run, given.client, given.format, given.output)
        return
    config = given.run / "config.yaml"
    checkpoint = newest_whole((given.run / "checkpoints").rglob("*.ckpt"))
    if not config.is_file() or checkpoint is None:
        if (given.run / RUN_FILE).is_file():
            raise ValueError(
                f"{str(given.run)!r} has its adapters as PEFT folders already; --format=onnx, safetensors or "
                "torch-export writes one of its models"
            )
        lacks = "whole checkpoints/last.ckpt" if config.is_file() else "config.yaml"
        raise FileNotFoundError(
            f"{str(given.run)!r} is not a finished run: it has no {lacks}; give a run folder of `perada fit`"
        )
    run = _with_data(given.run, config, checkpoint) if lacks_info(checkpoint) else open_run(given.run)
    check_none_lost(given.output, run.info)
    folder = run.save(given.output, client=given.client)
    written = sorted(path.name for path in folder.iterdir() if (path / "adapter_config.json").is_file())
    count = f"{len(written)} adapter{'s' * (len(written) > 1)}"
    print(f"Wrote {count} to {folder}: {' … '.join(dict.fromkeys((written[0], written[-1])))}")
    lines = privacy_lines(run.info.get("privacy"), joined_clients(run.info))
    if lines:
        print(lines)


def _with_data(folder: Path, config: Path, checkpoint: Path) -> Run:
    """The run of a checkpoint of an earlier perada, which does not say all of it: its data are read."""
    content = yaml.safe_load(config.read_text(encoding="utf-8"))
    if isinstance(content, dict) and isinstance(content.get("data"), str):
        raise ValueError(
            f"{str(folder)!r} was trained on data given in Python ({content['data']}), which cannot be loaded here; "
            "save what perada.finetune returned with Run.save"
        )
    quiet = ("logger=false", "enable_progress_bar=false", "devices=1", "num_nodes=1", "strategy=auto")
    cli = make_cli(["--config", str(config), *(f"--trainer.{option}" for option in quiet)], run=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The dirpath has changed", UserWarning)  # nothing is written there
        path = str(checkpoint)
        with plain_data(path, cli.trainer):
            cli.trainer.validate(cli.model, cli.datamodule, ckpt_path=path, verbose=False, weights_only=True)
    return outcome(cli.model, cli.loop)
