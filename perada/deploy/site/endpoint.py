# SPDX-License-Identifier: Apache-2.0
"""Where the requests for a site arrive: the counterpart of a transport, whose default is a Unix socket."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from perada.deploy.flower.socket import Listener, supervised
from perada.deploy.site.file import SiteFile


class Endpoint(Protocol):
    """Receives the messages of a server for a site, and carries the replies back."""

    def serve(self, answer: Callable[[bytes, str], bytes]) -> None:
        """Answer messages one after another, until the endpoint is closed.

        Args:
            answer: Returns the reply to a message, which also has a name of the run for logs
                (:meth:`.SiteWorker.answer`).
        """


def open_endpoint(site_file: SiteFile, max_bytes: int) -> AbstractContextManager[Endpoint]:
    """Open the socket of a site's file, to which Flower's ClientApp on the same machine connects.

    Args:
        site_file: Content of the site's file.
        max_bytes: Largest size of a message.

    Raises:
        ValueError: If the file has no socket, or it cannot be used.
    """
    check_endpoint(site_file)
    return Listener(site_file.socket, max_bytes)


def check_endpoint(site_file: SiteFile) -> None:
    """Raise a ValueError if a site's file has no socket, and systemd has opened none."""
    if site_file.socket is None and not supervised():
        raise ValueError("the site's file has no socket; add one, such as socket: perada.sock")
