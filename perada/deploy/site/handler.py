# SPDX-License-Identifier: Apache-2.0
"""Base class of the handlers that compute on a site's images."""

import logging
from dataclasses import dataclass

from perada.deploy.site.permissions import Permissions
from perada.deploy.state import SiteStore


@dataclass
class ImageHandler:
    """Base class of the handlers that compute on a site's images.

    Attributes:
        store: State folder of the site.
        permissions: What the site allows.
        log: Log for reasons, which never leave the site.
    """

    store: SiteStore
    permissions: Permissions
    log: logging.Logger
