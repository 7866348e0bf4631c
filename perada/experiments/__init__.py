# SPDX-License-Identifier: Apache-2.0
"""What is built of whole runs: tables that compare methods, the papers' studies, and the shipped weights."""
