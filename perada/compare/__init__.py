# SPDX-License-Identifier: Apache-2.0
"""`perada compare`: algorithms and seeds, with settings chosen from a grid on validation images, and one table.

In the order of reading: ``entries`` (the algorithms), ``grid`` (values and ranges), ``plan`` (which runs), ``running``
(one run), ``workers`` (several at once), ``results`` (the file), ``table`` (what is printed), ``command`` (all of it).
"""
