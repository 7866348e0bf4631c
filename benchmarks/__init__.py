# SPDX-License-Identifier: Apache-2.0
"""What is measured for speed, each as a ratio within one run: ``python -m benchmarks [NAME]``."""
