# SPDX-License-Identifier: Apache-2.0
"""Small experiments of the papers in closed form or on made-up data: ``perada study NAME``."""
