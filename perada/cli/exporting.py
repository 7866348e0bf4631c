# SPDX-License-Identifier: Apache-2.0
"""The command that exports a finished run."""

from pathlib import Path
from typing import Literal

from jsonargparse import ArgumentParser

from perada.cli.inference import export_one, open_run
from perada.results.joined import check_none_lost, joined_clients
from perada.results.privacy_card import privacy_lines
from perada.results.run_file import holds_adapters


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
    if holds_adapters(given.run):
        raise ValueError(
            f"{str(given.run)!r} has its adapters as PEFT folders already; --format=onnx, safetensors or torch-export "
            "writes one of its models"
        )
    run = open_run(given.run)
    check_none_lost(given.output, run.info)
    folder = run.save(given.output, client=given.client)
    written = sorted(path.name for path in folder.iterdir() if (path / "adapter_config.json").is_file())
    count = f"{len(written)} adapter{'s' * (len(written) > 1)}"
    print(f"Wrote {count} to {folder}: {' … '.join(dict.fromkeys((written[0], written[-1])))}")
    lines = privacy_lines(run.info.get("privacy"), joined_clients(run.info))
    if lines:
        print(lines)
