# SPDX-License-Identifier: Apache-2.0
"""Half an hour on one GPU: what is measured there, in order of worth, each part with a limit of time.

``make gpu`` runs it. The runner only needs Python itself, so that it can say which packages are missing.
"""
