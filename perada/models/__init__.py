# SPDX-License-Identifier: Apache-2.0
"""Backbones, their adapter slot, and weight files."""
