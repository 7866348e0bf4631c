# SPDX-License-Identifier: Apache-2.0
"""Files, locks, disks, signals and processes: what perada asks of the operating system."""
