# SPDX-License-Identifier: Apache-2.0
"""Clients of a run by name or number. Nothing large is imported, so that a wrong name is found at once."""

from collections.abc import Mapping, Sequence
from typing import Any

from perada.core.checks import check_integer
from perada.core.text import abbreviated, near_names


def client_index(client: int | str | None, client_names: Sequence[str] | None, num_clients: int) -> int:
    """Return the number of a client, given its number, also as text, or its name.

    Raises:
        ValueError: If there is no such client.
    """
    if client_names is not None and client in client_names:
        return list(client_names).index(str(client))
    if isinstance(client, str) and not client.isdecimal():
        similar = near_names(client, client_names or ())
        if similar:
            hint = f"did you mean {similar[0]!r}?"
        elif client_names:
            hint = f"the clients are {abbreviated(client_names)}"
        else:
            hint = f"the clients have no names: pass a number from 0 to {num_clients - 1}"
        raise ValueError(f"client={client!r} is unknown; {hint}")
    number = int(client) if isinstance(client, str) else client
    check_integer("client", number, 0, le=num_clients - 1)
    assert number is not None
    return number


def available_client(client: int | str | None, info: Mapping[str, Any], num_clients: int) -> int:
    """Return the number of a client whose adapter is in the run.

    Args:
        client: Name or number of the client.
        info: Facts about the run, as in ``run.json``.
        num_clients: Number of clients of the run.

    Raises:
        ValueError: If there is no such client, it was forgotten, or its adapter is at its site.
    """
    number = client_index(client, info.get("clients"), num_clients)
    if number in info.get("forgotten", ()):
        raise ValueError(
            f"client={client!r} was forgotten: the run no longer has its adapter; choose a different client"
        )
    if number in info.get("elsewhere", ()):
        raise ValueError(
            f"client={client!r} keeps its adapter at its site, so the server does not have it; export it there "
            "(perada deploy export site.yaml), or use the global model"
        )
    return number


def check_new_name(option: str, name: str, client_names: Sequence[str] | None, num_clients: int) -> None:
    """Raise a ValueError if a name is empty, or is the name or the number of a client of a run.

    Args:
        option: Name of the option for the message.
        name: Name of a new client.
        client_names: Names of the run's clients; None if they have none.
        num_clients: Number of clients of the run.
    """
    is_number_of_client = name.isdecimal() and int(name) < num_clients
    if name == "" or name in (client_names or ()) or is_number_of_client:
        raise ValueError(
            f"{option}={name!r} is empty or already the name or number of a client of the run; choose a different name"
        )
