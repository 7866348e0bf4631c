# SPDX-License-Identifier: Apache-2.0
"""`perada compare`: algorithms and seeds, with settings chosen from a grid on validation images, and one table.

In the order of reading: ``file`` (what is to be compared), ``grid`` (values and ranges), ``plan`` (which runs),
``running`` (one run, several at once), ``results`` (the file, and what is printed of it), ``command`` (all of it).
"""
