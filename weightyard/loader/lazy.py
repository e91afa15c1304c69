"""Lazy weights: safetensors' interface on a version, read only where it is looked at."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import msgspec

from weightyard.closing import Closing
from weightyard.errors import ManifestInvalid, NoSuchThing, Refused
from weightyard.format.dtypes import nbytes
from weightyard.format.manifest import TensorEntry
from weightyard.format.safetensors import LENGTH_BYTES, MAX_HEADER_BYTES
from weightyard.loader.asked import Asked
from weightyard.loader.choosing import some_of
from weightyard.loader.origin import Destination, Origin
from weightyard.loader.placing import device_of
from weightyard.loader.plan import plan_tensors
from weightyard.loader.slicing import Index
from weightyard.records import Version

if TYPE_CHECKING:
    import torch


class _Head(msgspec.Struct):
    """All that is looked at of a safetensors header."""

    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)


class LazyWeights(Closing):
    """What `yard.safe_open` gives: as safetensors' `safe_open`, for all files of a model at once.

    A context manager. While it is open a lease keeps the version's bytes, even if the version is
    removed. Thread-safe.
    """

    def __init__(self, origin: Origin, asked: Asked, device: Any = "cpu") -> None:
        self._origin = origin
        self._asked = asked
        self._device = device_of(device)
        self._entries = {entry.name: entry for entry in origin.chosen(asked)}
        origin.open_files(entry.file for entry in self._entries.values())
        self._open = ExitStack()
        self._open.enter_context(origin.held())
        try:
            origin.foresee(self._entries.values(), asked)
        except BaseException:
            self._open.close()
            raise
        self._is_closed = False
        origin.recheck()

    @property
    def version(self) -> Version:
        return self._origin.version

    def keys(self) -> list[str]:
        """The names of the tensors, in model order."""
        return list(self._entries)

    def offset_keys(self) -> list[str]:
        """The same: reading in this order is the fastest."""
        return self.keys()

    def metadata(self) -> dict[str, str] | None:
        """What the files say of themselves in their headers; None if they say nothing."""
        self._require_open()
        files = {entry.file for entry in self._entries.values() if entry.file is not None}
        found: dict[str, str] = {}
        for number in sorted(files):
            found |= self._header_metadata(number)
        return found or None

    def get_tensor(self, name: str) -> torch.Tensor:
        """A tensor. Raises NoSuchThing, and what loading raises."""
        return self.read(self._entry(name), ...)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name, in model order, read side by side. Tied ones come back tied."""
        self._require_open()
        plans = plan_tensors(list(self._entries.values()))
        read = self._origin.tensors(plans, self._asked, Destination(self._device))
        found = {name: tensor for one, tensor in read for name in one.names}
        return {name: found[name] for name in self._entries}

    def get_slice(self, name: str) -> LazySlice:
        """A tensor of which only what is indexed is read."""
        return LazySlice(self, self._entry(name))

    def close(self) -> None:
        """Give the lease up. Idempotent."""
        self._is_closed = True
        self._open.close()

    def read(self, entry: TensorEntry, index: Index) -> torch.Tensor:
        """What an index picks of a tensor."""
        self._require_open()
        plans = plan_tensors([msgspec.structs.replace(entry, tied=None)], {entry.name: index})
        to = Destination(self._device)
        ((_, tensor),) = self._origin.tensors(plans, self._asked, to)
        return tensor

    def _require_open(self) -> None:
        if self._is_closed:
            raise Refused(f"{self.version.ref} was closed: open it again")

    def _entry(self, name: str) -> TensorEntry:
        if name not in self._entries:
            near = some_of(self.keys(), str(name))
            raise NoSuchThing(
                f"{self.version.ref} has no tensor {str(name)[:200]!r}; there are {near}"
            )
        return self._entries[name]

    def _header_metadata(self, number: int) -> dict[str, str]:
        """The file's tensors lie at its end without holes, so what is before them is the header."""
        manifest = self._origin.manifest
        file = manifest.files[number]
        length = file.bytes - sum(
            nbytes(tensor.dtype, tensor.shape)
            for tensor in manifest.tensors
            if tensor.file == number
        )
        most = LENGTH_BYTES + MAX_HEADER_BYTES
        if not LENGTH_BYTES <= length <= most:
            raise ManifestInvalid(f"{file.path}: its tensors leave {length} bytes for a header")
        head = self._origin.head(file, length, self._asked)
        try:
            return msgspec.json.decode(head[LENGTH_BYTES:], type=_Head).metadata
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as why:
            raise ManifestInvalid(f"header of {file.path}: {str(why)[:200]}") from None


class LazySlice:
    """A tensor not read yet; indexing it reads what the index needs."""

    def __init__(self, weights: LazyWeights, entry: TensorEntry) -> None:
        self._weights = weights
        self._entry = entry

    def get_shape(self) -> list[int]:
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """As safetensors names it, such as `BF16`."""
        return self._entry.dtype.value

    def __getitem__(self, index: Index) -> torch.Tensor:
        return self._weights.read(self._entry, index)
