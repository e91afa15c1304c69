"""Budget: how the memory that a load may take besides its tensors is divided. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from weightyard.errors import BadSetting
from weightyard.format.block import MIB
from weightyard.loader.batches import AHEAD_BYTES, BATCH_BYTES
from weightyard.transfer.reader import MAX_HOST_BYTES

LEAST_HOST_BYTES = 64 * MIB
LEAST_DEVICE_BYTES = 16 * MIB

READS_AT_ONCE = 2
"""Batches read at once, so that the last requests of one do not leave the link idle."""

SLABS = 3
"""Two being filled while a third is on its way to the device."""

DEVICE_WORK_BYTES = 12 * MIB
"""What a device that decodes allocates while it works on a part of the scratch memory: a few
times the bytes of one plane."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What may be used. Half of the host's is for reading, half for what is on its way.

    Tensors that are put together on the host for a device are not counted. Raises BadSetting.
    """

    max_host_bytes: int | None = None
    max_device_extra_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, bound, least in (
            ("max_host_bytes", self.max_host_bytes, LEAST_HOST_BYTES),
            ("max_device_extra_bytes", self.max_device_extra_bytes, LEAST_DEVICE_BYTES),
        ):
            if bound is not None and bound < least:
                raise BadSetting(f"{name} is {bound}: loading needs {least}")

    @property
    def reading_bytes(self) -> int:
        """For each of the batches that are read at once."""
        if self.max_host_bytes is None:
            return MAX_HOST_BYTES
        return min(MAX_HOST_BYTES, self.max_host_bytes // 2 // READS_AT_ONCE)

    def ahead_bytes(self, asked_bytes: int | None = None) -> int:
        """What may be read before it is asked for."""
        ahead = AHEAD_BYTES if asked_bytes is None else asked_bytes
        return ahead if self.max_host_bytes is None else min(ahead, self.max_host_bytes // 2)

    def batch_bytes(self, ahead_bytes: int) -> int:
        return max(MIB, min(BATCH_BYTES, ahead_bytes // 4))

    def slab_bytes(self, *, device_decode: bool) -> int:
        """Of a ring; a device that decodes has scratch memory as long as a slab."""
        most = BATCH_BYTES
        if self.max_host_bytes is not None:
            most = min(most, self.max_host_bytes // 2 // SLABS)
        if device_decode and self.max_device_extra_bytes is not None:
            most = min(most, self.max_device_extra_bytes - DEVICE_WORK_BYTES)
        return most // MIB * MIB
