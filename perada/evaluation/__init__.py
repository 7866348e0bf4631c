# SPDX-License-Identifier: Apache-2.0
"""Scores of existing models at every client, with intervals, without training."""
