# SPDX-License-Identifier: Apache-2.0
"""Scores: metrics, and what is counted over batches and processes to compute them."""
