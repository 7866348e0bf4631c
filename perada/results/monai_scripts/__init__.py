# SPDX-License-Identifier: Apache-2.0
"""Python code of a MONAI bundle that perada exported. It is copied into the bundle and needs no perada."""
