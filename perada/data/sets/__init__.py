# SPDX-License-Identifier: Apache-2.0
"""Sets of images."""
