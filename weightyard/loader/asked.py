"""Asked: what a caller wants of a version, and how."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from weightyard.errors import BadSetting, Unsupported
from weightyard.format.manifest import TensorEntry
from weightyard.loader.budget import Budget
from weightyard.loader.choosing import by_name
from weightyard.loader.layouts import is_layout, local_index
from weightyard.loader.slicing import Index
from weightyard.storage.deadline import NEVER, Deadline
from weightyard.transfer.options import require_function, texts_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Asked:
    """What is wanted of a version, and how."""

    files: str | Collection[str] | None = None
    tensors: str | Collection[str] | None = None
    slices: Mapping[str, Any] | None = None
    dtype: Any = None
    verify: Literal["fast", "full"] = "fast"
    deadline: Deadline = NEVER
    progress: Callable[[int], None] | None = None
    device_decode: bool = False
    budget: Budget = field(default_factory=Budget)

    def __post_init__(self) -> None:
        if self.verify not in ("fast", "full"):
            raise BadSetting(f"verify={self.verify!r}: it is 'fast' or 'full'")
        if self.device_decode and self.verify == "full":
            raise BadSetting("verify='full' hashes blocks on the host: leave device_decode out")
        texts_of("files", self.files)
        texts_of("tensors", self.tensors)
        require_function("progress", self.progress)
        are_texts = isinstance(self.slices, Mapping) and all(
            isinstance(name, str) for name in self.slices
        )
        if self.slices is not None and not are_texts:
            raise BadSetting("slices= takes slices by the names or patterns of tensors")

    @property
    def is_whole(self) -> bool:
        """Whether all of the files' tensors are wanted, and all of each."""
        return self.tensors is None and not self.slices

    @property
    def is_all(self) -> bool:
        """Whether they are also wanted as they are stored: not cast."""
        return self.is_whole and self.dtype is None

    @property
    def file_patterns(self) -> Sequence[str] | None:
        return texts_of("files", self.files)

    @property
    def tensor_patterns(self) -> Sequence[str] | None:
        return texts_of("tensors", self.tensors)

    def indices(self, entries: Sequence[TensorEntry]) -> dict[str, Index]:
        """The slices asked for, by tensor name; where that is a layout, this rank's shard."""
        if not self.slices:
            return {}
        shapes = {entry.name: entry.shape for entry in entries}
        return {
            name: local_index(one, shapes[name]) if is_layout(one) else one
            for name, one in by_name(shapes, self.slices).items()
        }

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The dtype to cast to, which may be given by its name. Raises Unsupported."""
        import torch

        if self.dtype is None:
            return None
        found = self.dtype
        if isinstance(found, str):
            found = getattr(torch, found.removeprefix("torch."), None)
        if not isinstance(found, torch.dtype):
            raise Unsupported(f"dtype {self.dtype!r} is none of torch's, such as 'bfloat16'")
        if not found.is_floating_point:
            raise Unsupported(
                f"dtype {self.dtype!r}: tensors are cast to floating point only, such as 'bfloat16'"
            )
        try:
            torch.zeros(1, device="cpu").to(found)
        except NotImplementedError:  # such as float4_e2m1fn_x2
            raise Unsupported(f"dtype {self.dtype!r}: torch does not cast to it") from None
        return found


def deadline_of(timeout: float | None) -> Deadline:
    """Until when a load may go on. Raises BadSetting."""
    is_number = isinstance(timeout, Real) and not isinstance(timeout, bool)
    if timeout is None or (is_number and timeout > threading.TIMEOUT_MAX):
        return NEVER
    if is_number and timeout >= 0:
        return Deadline.after(timeout)
    raise BadSetting(f"timeout={timeout!r}: seconds, or None to wait as long as it takes")
