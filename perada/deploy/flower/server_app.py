# SPDX-License-Identifier: Apache-2.0
"""The ServerApp of a deployed run: reads the options of the run and hands Flower's grid on as a transport."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from perada.core.checks import check_choice, check_number, check_whole
from perada.deploy.flower.transport import FlowerTransport
from perada.deploy.transport import Transport

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp


@dataclass(frozen=True)
class RunOptions:
    """How a deployed run goes.

    Args:
        min_sites: Sites whose replies a round needs.
        sample: Sites that a round asks; 0 for all that are connected. The first ``min_sites`` replies count.
        deadline: Seconds that a round waits for replies.
        late: What becomes of a round that has too few by then: ``wait`` asks again, ``skip`` goes on with what came.
        resume: Whether to go on with what the state folder holds.
        state: Folder for the server's state, on the SuperLink's machine; "" for one in Flower's own folder.

    Raises:
        ValueError: For a value that cannot be used.
    """

    min_sites: int = 2
    sample: int = 0
    deadline: float = 600.0
    late: str = "wait"
    resume: bool = False
    state: str = ""

    def __post_init__(self) -> None:
        check_whole("min_sites", self.min_sites)
        check_whole("sample", self.sample, least=0, hint="0 asks all sites that are connected")
        if 0 < self.sample < self.min_sites:
            raise ValueError(
                f"sample={self.sample} asks fewer sites than min_sites={self.min_sites} needs; give at least as many"
            )
        check_number("deadline", self.deadline, above=0, hint="seconds")
        check_choice("late", self.late, ["wait", "skip"])
        if self.state and not Path(self.state).is_absolute():
            raise ValueError(f"state={self.state!r} is relative; give the path from / on, on the SuperLink's machine")

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """The options among those that Flower hands on, whose names have dashes."""
        names = {field.name.replace("_", "-"): field.name for field in fields(cls)}
        return cls(**{names[key]: value for key, value in config.items() if key in names})

    def config(self) -> dict[str, str | int | float | bool]:
        """The options as Flower hands them on."""
        return {field.name.replace("_", "-"): getattr(self, field.name) for field in fields(self)}


Serve = Callable[[Path, Transport, RunOptions, Path], None]
"""Runs a recipe over a transport: the recipe's file, the transport, the options, the folder for the server's state."""


def server_app(serve: Serve, recipe: Path) -> "ServerApp":
    """The app of the folder that `perada deploy init` writes."""
    from flwr.serverapp import ServerApp

    def main(grid: "Grid", context: "Context") -> None:
        from flwr.supercore.utils import get_flwr_home

        options = RunOptions.of(context.run_config)
        digest = str(context.run_config["digest"])
        state = Path(options.state) if options.state else get_flwr_home() / "perada" / digest
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        serve(recipe, FlowerTransport(grid), options, state)

    app = ServerApp()
    app.main()(main)
    return app
