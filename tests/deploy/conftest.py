# SPDX-License-Identifier: Apache-2.0
"""The app of the tests is Flower's to run: it imports what need not be installed."""

collect_ignore = ["stub_app"]
