# SPDX-License-Identifier: Apache-2.0
"""The same recipe across real sites.

Nothing is imported here: the process that only passes bytes on at a site has no torch.
"""
