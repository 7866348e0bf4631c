# SPDX-License-Identifier: Apache-2.0
"""Secure aggregation: a server learns the sum of what sites have, and no part of it."""
