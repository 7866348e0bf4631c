# SPDX-License-Identifier: Apache-2.0
"""Beside the library: runs side by side (``perada compare``), pages on runs, the papers' studies (``perada study``)."""
