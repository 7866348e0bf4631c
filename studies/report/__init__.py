# SPDX-License-Identifier: Apache-2.0
"""``perada report``: one page that shows what runs measured, with its figures and tables as files beside it."""
