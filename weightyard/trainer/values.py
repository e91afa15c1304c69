"""Values of a program as a checkpoint that one process makes, or reads, by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

from weightyard.errors import NoSuchThing
from weightyard.trainer.packing import Items, Room, pack, places, unpack
from weightyard.trainer.reader import YardReader
from weightyard.trainer.saving import plain_errors, quiet_alone
from weightyard.trainer.writer import YardWriter

if TYPE_CHECKING:
    from weightyard.yard import Yard


def save_values(writer: YardWriter, step: int, values: Mapping[str, object]) -> None:
    """Publish a checkpoint of values by name; their tensors go by name and keys.

    Raises Refused, naming what cannot be saved; as YardWriter does.
    """
    items: Items = {}
    for name, value in values.items():
        items |= pack(name, value)
    quiet_alone()
    with plain_errors():
        save_checkpoint(items, checkpoint_id=f"step-{step}", storage_writer=writer, no_dist=True)


def load_values(
    yard: Yard, ref: str, *names: str, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Values that a checkpoint has, in host memory.

    `group`: all its ranks call this, and each byte is read once for them; None: this process reads
    for itself alone.
    Raises NoSuchThing, also for a name it does not have; TooLarge for what claims more memory than
    this rank may have; Damaged, Retryable.
    """
    is_alone = group is None
    reader = YardReader(yard, ref, process_group=group, no_dist=is_alone)
    metadata = reader.read_metadata()
    items: Items = {}
    room = Room()
    for name in names:
        if not (wanted := places([name], metadata, {}, room)):
            raise NoSuchThing(f"{ref} holds no {name}: something else made it")
        items |= wanted
    if is_alone:
        quiet_alone()
    with plain_errors():
        load_checkpoint(items, storage_reader=reader, process_group=group, no_dist=is_alone)
    return {name: unpack(name, items) for name in names}
