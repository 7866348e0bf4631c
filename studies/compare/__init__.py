# SPDX-License-Identifier: Apache-2.0
"""`perada compare`: algorithms and seeds, with settings chosen from a grid on validation images, and one table.

In the order of reading: ``file`` (the description of a comparison), ``grid`` (values and ranges), ``entries`` (named
algorithms), ``plan`` (the runs), ``running`` (one run, and several at once), ``results`` (the file of results, and the
choice), ``tables`` (the printed tables), ``command`` (the command).
"""
