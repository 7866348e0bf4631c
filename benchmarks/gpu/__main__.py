# SPDX-License-Identifier: Apache-2.0
"""Run what half an hour on one GPU has to bring: ``python -m benchmarks.gpu [--help]``, or ``make gpu``."""

import argparse
import signal
import sys
from pathlib import Path

from benchmarks.gpu.parts import PARTS, Setting
from benchmarks.gpu.runner import RECORD, missing_device, run_parts
from benchmarks.gpu.tables import page, write_into


def main() -> None:
    """Run the parts; the exit status is 1 if one of them failed or could not be run."""
    arguments = _parser().parse_args()
    output = arguments.output or Path("lightning_logs", "gpu_quick" if arguments.quick else "gpu")
    output = output.resolve()
    if arguments.document is not None:
        write_into(arguments.document, page(PARTS, output))
        return
    if arguments.list:
        for part in PARTS:
            print(f"{part.name:24} {part.minutes:4g} min  {part.purpose}")
        return
    fashion_mnist = arguments.fashion_mnist and arguments.fashion_mnist.resolve()
    setting = Setting(arguments.device, arguments.quick, output, fashion_mnist, arguments.jobs)
    if reason := missing_device(setting.device):
        sys.exit(reason)
    parts = [part for part in PARTS if not arguments.only or part.name in arguments.only]
    # What ends this process ends the part under way, too, and is noted.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        outcomes = run_parts(parts, setting, arguments.minutes)
    except KeyboardInterrupt:
        sys.exit(f"interrupted; what is known is in {output}, and the same command goes on from there")
    finally:
        if (output / RECORD).is_file():
            (output / "tables.md").write_text(page(PARTS, output), encoding="utf-8")
    print(f"tables: {output / 'tables.md'}")
    if any(outcome.status != "done" for outcome in outcomes):
        sys.exit(1)


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Tests, rounds, private steps and evidence on one GPU, each part with a limit of its own. "
        "Run again, the command leaves out what is done and goes on with the rest.",
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="Everything as small as possible: shows that it runs.")
    parser.add_argument("--output", type=Path, help="Folder of the results (default: lightning_logs/gpu).")
    parser.add_argument("--fashion-mnist", type=Path, metavar="FOLDER", help="Where Fashion-MNIST's idx files are.")
    parser.add_argument("--jobs", type=int, default=7, help="Runs of a comparison at once (default: 7).")
    parser.add_argument("--minutes", type=float, default=30.0, help="Limit of all parts together (default: 30).")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", choices=[part.name for part in PARTS])
    parser.add_argument("--list", action="store_true", help="Name the parts with their limits, and run none.")
    parser.add_argument(
        "--document", type=Path, metavar="FILE", help="Write the tables of --output between the marks of a page."
    )
    return parser


if __name__ == "__main__":
    main()
