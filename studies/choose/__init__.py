# SPDX-License-Identifier: Apache-2.0
"""`perada choose`: the method, adapter and settings that suit a user's images, within a budget of time.

In the order of reading: ``budget`` (what fits into the time), ``candidates`` (methods and their settings), ``trials``
(held-out scores, and the choice by them), ``search`` (successive halving and the last rung), ``recipe_file`` (the
recipe that is handed over), ``summary`` (sentences), ``page`` (the page), ``command`` (the command).
"""
