"""zstd frames: standard ones that any zstd reads, held to what a segment may contain."""

from __future__ import annotations

import threading

import zstandard

from weightyard.errors import BlockCorrupt
from weightyard.format.block import CHUNK_BYTES

_MAGIC = b"\x28\xb5\x2f\xfd"
_CHECKSUM_BYTES = 4
_BLOCK_HEADER_BYTES = 3
_RLE = 1

MAX_WINDOW_BYTES = CHUNK_BYTES
"""A frame holds at most a chunk, so no honest one asks for a larger window."""

# The exponents of weights have no repeats worth a match: short ones that occur by chance cost more
# than the Huffman code they replace. With the smallest table and the longest minimum a match is
# found almost only where a plane really repeats (deltas, padding). A target length above 0, which
# is what the negative levels are, would switch Huffman off.
_HUFFMAN = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    window_log=17,
)
_MATCHING_LEVEL = 3


class _Contexts(threading.local):
    """zstd's contexts are not for two threads at once; these are each thread's own."""

    def __init__(self) -> None:
        self.huffman = zstandard.ZstdCompressor(compression_params=_HUFFMAN)
        self.matching = zstandard.ZstdCompressor(level=_MATCHING_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)


_contexts = _Contexts()


def compress_plane(data: memoryview) -> bytes:
    """A frame for numbers: all but pure Huffman coding."""
    return _contexts.huffman.compress(data)


def compress_text(data: memoryview) -> bytes:
    """A frame for bytes in which longer runs come back, as in text and tables."""
    return _contexts.matching.compress(data)


def decompress_into(frame: memoryview, out: memoryview) -> None:
    """Fill `out` exactly from a frame of exactly that content. Raises BlockCorrupt, saying why.

    Nothing is allocated by what the frame says. It must be one frame whose stated content is as
    long as `out` and whose blocks end where it ends; zstd then decodes it in one pass straight into
    `out`, and refuses dictionaries, reserved blocks and content of another length itself.
    """
    try:
        _check_frame(frame, len(out))
        written = _contexts.decompressor.stream_reader(frame).readinto(out)
    except zstandard.ZstdError as why:
        raise BlockCorrupt(f"zstd: {why}") from None
    if written != len(out):
        raise BlockCorrupt(f"zstd frame ended after {written} of {len(out)} bytes")


def _check_frame(frame: memoryview, content_bytes: int) -> None:
    # Skippable and legacy frames begin otherwise; zstd would take them.
    if frame[:4] != _MAGIC:
        raise BlockCorrupt("not a zstd frame")
    stated = zstandard.get_frame_parameters(frame)
    if stated.content_size != content_bytes:
        raise BlockCorrupt(f"zstd frame of {stated.content_size} bytes, not {content_bytes}")
    if stated.window_size > MAX_WINDOW_BYTES:
        raise BlockCorrupt(f"zstd frame wants a window of {stated.window_size} bytes")
    end = zstandard.frame_header_size(frame)
    is_last = False
    while not is_last:
        header = int.from_bytes(frame[end : end + _BLOCK_HEADER_BYTES], "little")
        if end + _BLOCK_HEADER_BYTES > len(frame):
            raise BlockCorrupt("zstd frame is cut off")
        is_last, kind = bool(header & 1), header >> 1 & 3
        end += _BLOCK_HEADER_BYTES + (1 if kind == _RLE else header >> 3)
    end += _CHECKSUM_BYTES if stated.has_checksum else 0
    if end != len(frame):
        raise BlockCorrupt(f"zstd frame of {end} bytes, stored in {len(frame)}")
