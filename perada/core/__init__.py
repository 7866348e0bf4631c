# SPDX-License-Identifier: Apache-2.0
"""Values without behaviour: states, seeds, ranks, rounds and batches."""
