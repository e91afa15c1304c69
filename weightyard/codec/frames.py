"""zstd frames: standard ones that any zstd reads, held to what a segment may contain."""

from __future__ import annotations

import sys
import threading

import zstandard

from weightyard.codec.compiled import HuffmanCoder, decode_huffman
from weightyard.errors import BlockCorrupt
from weightyard.format.block import CHUNK_BYTES

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_MAGIC = b"\x28\xb5\x2f\xfd"
_CHECKSUM_BYTES = 4
_BLOCK_HEADER_BYTES = 3
_RLE = 1

MAX_WINDOW_BYTES = CHUNK_BYTES
"""A frame holds at most a chunk, so no honest one asks for a larger window."""

# With a step of this length (target_length) zstd hardly looks for matches: what is left is Huffman
# coding. zstd takes that, like its negative levels, as a wish not to code at all, unless told
# otherwise by an experimental parameter, ZSTD_c_literalCompressionMode. Python's own binding passes
# any parameter on, `zstandard` does not.
_LITERAL_COMPRESSION_MODE, _ENABLED = 1002, 1
_NO_MATCHES = {
    zstd.CompressionParameter.strategy: zstd.Strategy.fast,
    zstd.CompressionParameter.target_length: zstd.CompressionParameter.target_length.bounds()[1],
    zstd.CompressionParameter.hash_log: 6,
    zstd.CompressionParameter.window_log: 17,
    _LITERAL_COMPRESSION_MODE: _ENABLED,
}
# With the smallest table and the longest minimum, matches are found almost only where a plane
# really repeats, as a sparse delta's does. Short matches that occur by chance cost more than the
# Huffman code they replace.
_LONG_MATCHES = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    window_log=17,
)
_TEXT_LEVEL = 3


class _Contexts(threading.local):
    """zstd's contexts are not for two threads at once; these are each thread's own."""

    def __init__(self) -> None:
        self.coder = HuffmanCoder()
        self.noise = zstd.ZstdCompressor(options=_NO_MATCHES)
        self.runs = zstandard.ZstdCompressor(compression_params=_LONG_MATCHES)
        self.text = zstandard.ZstdCompressor(level=_TEXT_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)


_contexts = _Contexts()


def compress_noise(data: memoryview) -> bytes | memoryview:
    """A frame for numbers of which some are frequent, such as exponents: Huffman coding alone.

    It may lie in memory that this thread's next call overwrites.
    """
    return _contexts.coder.frame(data) or compress_noise_by_zstd(data)


def compress_noise_by_zstd(data: memoryview) -> bytes:
    """The same by zstd's own coder, which takes any bytes."""
    compressor = _contexts.noise
    compressor.set_pledged_input_size(len(data))
    return compressor.compress(data, mode=zstd.ZstdCompressor.FLUSH_FRAME)


def compress_runs(data: memoryview) -> bytes:
    """A frame for numbers that repeat for long, as in a delta of few changes."""
    return _contexts.runs.compress(data)


def compress_text(data: memoryview) -> bytes:
    """A frame for bytes in which words recur, as in text and tables."""
    return _contexts.text.compress(data)


def decompress_into(frame: memoryview, out: memoryview) -> None:
    """Fill `out` exactly from a frame of exactly that content. Raises BlockCorrupt, saying why."""
    if not decode_huffman(frame, out):
        decompress_by_zstd(frame, out)


def decompress_by_zstd(frame: memoryview, out: memoryview) -> None:
    """The same by zstd alone, which decides what a frame is.

    What a frame states never decides how much is allocated. It must be one frame whose stated
    content is as long as `out` and whose blocks end where it ends; zstd then decodes it in one pass
    straight into `out`, and refuses dictionaries, reserved blocks and content of another length.
    """
    try:
        _check_frame(frame, len(out))
        written = _contexts.decompressor.stream_reader(frame).readinto(out)
    except zstandard.ZstdError as why:
        raise BlockCorrupt(f"zstd: {why}") from None
    if written != len(out):
        raise BlockCorrupt(f"zstd frame ended after {written} of {len(out)} bytes")


def _check_frame(frame: memoryview, content_bytes: int) -> None:
    # zstd would also take skippable and legacy frames, which begin with other bytes.
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
