# SPDX-License-Identifier: Apache-2.0
"""The ServerApp of a deployed run: reads the options of the run and hands Flower's grid on as a transport."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from perada.deploy.flower.transport import FlowerTransport
from perada.deploy.protocol import Transport

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp

    from perada.deploy.server.progress import Terms


@dataclass(frozen=True)
class RunOptions:
    """How a deployed run goes.

    Args:
        min_sites: As in :class:`.Terms`.
        sample: Likewise; 0 for what the recipe says.
        deadline: Likewise.
        late: Likewise.
        resume: Whether to continue from what the state folder holds.
        state: Folder for the server's state, on the SuperLink's machine; "" for one in Flower's own folder.

    Raises:
        ValueError: For a value that cannot be used.
    """

    min_sites: int = 2
    sample: int = 0
    deadline: float = 600.0
    late: Literal["wait", "skip"] = "wait"
    resume: bool = False
    state: str = ""

    def __post_init__(self) -> None:
        self.terms()
        if self.state and not Path(self.state).is_absolute():
            raise ValueError(f"state={self.state!r} is relative; give the path from / on, on the SuperLink's machine")

    def terms(self) -> "Terms":
        """When a round is closed."""
        from perada.deploy.server.progress import Terms

        return Terms(self.min_sites, self.sample or None, self.deadline, self.late)

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
