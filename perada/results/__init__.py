# SPDX-License-Identifier: Apache-2.0
"""What a run leaves: models and metrics, exported adapters, reports and the privacy card."""
