# SPDX-License-Identifier: Apache-2.0
"""Checks of the clients' and the server's datasets."""
