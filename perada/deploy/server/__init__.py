# SPDX-License-Identifier: Apache-2.0
"""The server of a deployed run."""
