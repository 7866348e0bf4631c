# SPDX-License-Identifier: Apache-2.0
"""``perada report``: one page on the results of runs, with its figures and tables as separate files."""
