# SPDX-License-Identifier: Apache-2.0
"""Secure aggregation: a server learns the sum of the sites' values, but none of the values."""
