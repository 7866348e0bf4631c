# SPDX-License-Identifier: Apache-2.0
"""Errors of medical images. Their messages never quote a value of a file, which may identify a patient."""


class MedicalImageError(ValueError):
    """Raised if a DICOM file or a NIfTI volume cannot be read as an image.

    Args:
        reason: What is wrong with the file, for the brackets of :class:`.UnreadableImageError`.
        remedy: What to do; an empty string for the remedy of the caller.
    """

    def __init__(self, reason: str, remedy: str = "") -> None:
        self.reason = reason
        self.remedy = remedy
        super().__init__(reason)
