"""weightyard: versioned model weights on HDFS, and the fastest way from HDFS onto a device.

import weightyard

with weightyard.open() as yard:
    yard.push("./model", "team/bert", alias="prod")
    weights = yard.load("team/bert@prod")
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightyard.yard import Yard
from weightyard.yard import open_yard as open

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from weightyard.records import Pushed

__all__ = ["Yard", "load", "open", "pull", "push"]


def push(source: str | Path | Mapping[str, Any], name: str, **options: Any) -> Pushed:
    """`Yard.push` on the default yard."""
    with open() as yard:
        return yard.push(source, name, **options)


def pull(ref: str, folder: str | Path, **options: Any) -> Path:
    """`Yard.pull` on the default yard."""
    with open() as yard:
        return yard.pull(ref, folder, **options)


def load(ref: str, **options: Any) -> dict[str, torch.Tensor]:
    """`Yard.load` on the default yard."""
    with open() as yard:
        return yard.load(ref, **options)
