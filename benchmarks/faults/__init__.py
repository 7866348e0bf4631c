# SPDX-License-Identifier: Apache-2.0
"""Faults that are put into runs on purpose, and what comes of each."""
