# SPDX-License-Identifier: Apache-2.0
"""What a step sees: batches of a round, and how they are made ready."""
