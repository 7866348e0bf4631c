# SPDX-License-Identifier: Apache-2.0
"""Flower between the server and its sites: keys, the app, the transport, and the socket of a site's worker."""
