# SPDX-License-Identifier: Apache-2.0
"""A site of a deployed run. Nothing is imported here: who only reads its file needs no torch."""
