# SPDX-License-Identifier: Apache-2.0
"""Medical images: DICOM files and slices of NIfTI volumes."""
