# SPDX-License-Identifier: Apache-2.0
"""The same task through perada, pfl-research and Flower's simulation, each in its own process, in turns.

Everything but :mod:`benchmarks.peers.__main__`, ``prepare``, ``scores`` and ``run_perada`` is imported in the peers'
environment too, where perada may not be installed.
"""
