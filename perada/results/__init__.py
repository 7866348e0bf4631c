# SPDX-License-Identifier: Apache-2.0
"""Results of a run: models and metrics, exported adapters, reports and the privacy card."""
