# SPDX-License-Identifier: Apache-2.0
"""The network of the bundle.

ONNX Runtime and MONAI are imported late, since perada does not need them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class OnnxNetwork(nn.Module):
    """Runs an ONNX file as a network of PyTorch, without gradients.

    Args:
        path: The file.
        providers: Where ONNX Runtime computes, such as ``["CUDAExecutionProvider", "CPUExecutionProvider"]``.
    """

    def __init__(self, path: str, providers: Sequence[str] = ("CPUExecutionProvider",)) -> None:
        super().__init__()
        import onnxruntime

        self._session = onnxruntime.InferenceSession(path, providers=list(providers))

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, channels, H, W) to logits, (B, K) or (B, K, H, W), with the images' device and metadata."""
        from monai.utils import convert_to_dst_type

        # Further outputs, such as the mask of typical images, are not logits.
        logits = self._session.run(["logits"], {"images": images.detach().cpu().numpy()})[0]
        result: Tensor = convert_to_dst_type(torch.from_numpy(logits), images)[0]
        return result
