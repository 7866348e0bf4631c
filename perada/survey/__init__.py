# SPDX-License-Identifier: Apache-2.0
"""A survey of images before training: counts that clients can add up, and in words where their data do not fit."""
