"""Budget: how the memory that a load may take besides its tensors is divided. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from weightyard.codec.arena import ARENA_BYTES
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


CONVERTED_BYTES = 8 * MIB
"""Scratch memory of a device, for tensors converted there; less than LEAST_DEVICE_BYTES."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What may be used. Half of the host's memory is for reading, half for bytes on their way.

    Tensors that are put together on the host for a device are not counted. Raises BadSetting.
    """

    max_host_bytes: int | None = None
    max_device_extra_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, bound, least in (
            ("max_host_bytes", self.max_host_bytes, LEAST_HOST_BYTES),
            ("max_device_extra_bytes", self.max_device_extra_bytes, LEAST_DEVICE_BYTES),
        ):
            if not isinstance(bound, int | None):
                raise BadSetting(f"{name}={bound!r}: a whole number of bytes")
            if bound is not None and bound < least:
                raise BadSetting(f"{name} is {bound}: loading needs {least}")

    @property
    def decoders(self) -> int | None:
        """The most threads that decode for each of the batches read at once; None: any number.

        Each has scratch memory; half of what reading may use is for all of that together.
        """
        if self.max_host_bytes is None:
            return None
        return max(1, self.max_host_bytes // 4 // READS_AT_ONCE // ARENA_BYTES)

    @property
    def reading_bytes(self) -> int:
        """For each of the batches read at once, besides the scratch memory of its decoders."""
        if self.max_host_bytes is None or self.decoders is None:
            return MAX_HOST_BYTES
        each = self.max_host_bytes // 2 // READS_AT_ONCE
        return min(MAX_HOST_BYTES, each - self.decoders * ARENA_BYTES)

    def ahead_bytes(self, asked_bytes: int | None = None) -> int:
        """How much may be read ahead of the caller."""
        ahead = AHEAD_BYTES if asked_bytes is None else asked_bytes
        return ahead if self.max_host_bytes is None else min(ahead, self.max_host_bytes // 2)

    def batch_bytes(self, ahead_bytes: int) -> int:
        return max(MIB, min(BATCH_BYTES, ahead_bytes // 4))

    @property
    def round_bytes(self) -> int | None:
        """What a group exchanges at a time, and what each rank reads at a time; None: any amount.

        In memory at a time are two of these that were read ahead, one that was exchanged, and
        what is being placed.
        """
        return None if self.max_host_bytes is None else self.max_host_bytes // 16

    def slab_bytes(self, *, device_decode: bool, by_group: bool = False) -> int:
        """The length of a ring's slabs. A device that decodes has scratch memory as long as one.

        `by_group`: half of the ring's memory is needed for what is exchanged.
        """
        most = BATCH_BYTES
        if self.max_host_bytes is not None:
            most = min(most, self.max_host_bytes // (4 if by_group else 2) // SLABS)
        if device_decode and self.max_device_extra_bytes is not None:
            most = min(most, self.max_device_extra_bytes - DEVICE_WORK_BYTES)
        return most // MIB * MIB
