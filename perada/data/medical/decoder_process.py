# SPDX-License-Identifier: Apache-2.0
"""Program that decodes compressed frames of DICOM files for another process, in which a decoder must not crash.

Damaged frames end GDCM by a signal and let CharLS run without end. :mod:`perada.data.medical.isolation` starts this
file by its path, so it imports nothing of perada. Requests come on the standard input and answers go to the standard
output: the length of a header in JSON (4 bytes), the header, whose ``size`` is the number of bytes after it, and these
bytes.
"""

import contextlib
import json
import logging
import os
import struct
import sys
import warnings
from dataclasses import dataclass
from importlib import import_module
from typing import IO, Any

SPARE_BYTES = 2**28
"""Memory that decoding a frame may take besides the multiple of the frame."""
COPIES_OF_FRAME = 16
"""Memory that decoding a frame may take, in sizes of the decoded frame: decoders compute in 32 bits."""


@dataclass(frozen=True)
class DecoderMessage:
    """A request to the process, or its answer.

    Attributes:
        header: What JSON can hold.
        content: Bytes: the compressed frame of a request, the values of an answer.
    """

    header: dict[str, Any]
    content: bytes


def read_message(stream: IO[bytes]) -> DecoderMessage | None:
    """Read a message; None at the end of the stream."""
    length = stream.read(4)
    if len(length) < 4:
        return None
    header = json.loads(stream.read(struct.unpack("<I", length)[0]))
    return DecoderMessage(header, stream.read(header["size"]))


def write_message(stream: IO[bytes], message: DecoderMessage) -> None:
    """Write a message, with the size of its content in its header."""
    header = message.header | {"size": len(message.content)}
    encoded = json.dumps(header).encode()
    stream.write(struct.pack("<I", len(encoded)))
    stream.write(encoded)
    stream.write(message.content)
    stream.flush()


def _used_memory() -> int:
    """Return the bytes of memory that this process has; 0 where they are unknown."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def _limit_memory(used: int, frame_bytes: int) -> None:
    """Limit the memory of this process to what it has and what decoding a frame may take."""
    # Windows has no limits, and macOS rejects this one.
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        hard_limit = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = used + COPIES_OF_FRAME * frame_bytes + SPARE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard_limit))


def _decode_frame(request: DecoderMessage) -> DecoderMessage:
    """Return the answer to a request: type and shape of the frame, and its values."""
    # The other process imports this file, too, also where pydicom is not installed.
    from pydicom.encaps import encapsulate
    from pydicom.pixels import get_decoder

    decoder = get_decoder(request.header["syntax"])
    plugins = [name for name in request.header["plugins"] if name in decoder.available_plugins]
    array, properties = decoder.as_array(
        encapsulate([request.content]),
        index=0,
        decoding_plugin=plugins[0] if plugins else "",
        **request.header["options"],
    )
    header = {
        "dtype": array.dtype.str,
        "shape": list(array.shape),
        "photometric": str(properties["photometric_interpretation"]),
    }
    return DecoderMessage(header, array.tobytes())


def answer_requests() -> None:
    """Answer requests until the standard input ends, or damaged frames have left too much memory behind."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    requests = sys.stdin.buffer
    answers = sys.stdout.buffer
    import_module("pydicom.pixels")
    used_at_start = _used_memory()
    is_last = False
    while not is_last and (request := read_message(requests)) is not None:
        _limit_memory(_used_memory(), request.header["frame_bytes"])
        try:
            answer = _decode_frame(request)
        except Exception as error:  # decoders raise many types, whose texts may quote the file
            answer = DecoderMessage({"error": type(error).__name__}, b"")
        # Decoders do not free all of the memory of a frame that they cannot decode.
        is_last = _used_memory() - len(answer.content) > used_at_start + SPARE_BYTES
        write_message(answers, DecoderMessage(answer.header | {"is_last": is_last}, answer.content))


if __name__ == "__main__":
    answer_requests()
