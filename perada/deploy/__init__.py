# SPDX-License-Identifier: Apache-2.0
"""The same recipe across real sites. Nothing is imported here, so that the thin process at a site needs no torch."""
