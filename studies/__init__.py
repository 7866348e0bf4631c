# SPDX-License-Identifier: Apache-2.0
"""Beside the library: the papers' small experiments (``perada study NAME``), pre-training, and pages on runs."""
