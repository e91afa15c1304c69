"""Checkpoints of several ranks, as tests of registry, service and client need them."""

from __future__ import annotations

from typing import Any

from weightyard.format.assembly import Share, joined, share_of
from weightyard.format.block import MIB
from weightyard.format.dtypes import DType
from weightyard.format.manifest import Manifest
from weightyard.format.splitting import StateTensor, split_state
from weightyard.names import ModelName
from weightyard.records import Checkpoint, Publication, Version
from weightyard.storage.store import Store
from weightyard.transfer.catalogue import Catalogue, Upload
from weightyard.transfer.publish import publish
from weightyard.transfer.source import MemorySource
from weightyard.transfer.writer import Content, WriteOptions, Writer

RUN = ModelName("team", "run42")


class Saving:
    """A checkpoint on its way: each content is a tensor that a rank of its own writes."""

    def __init__(
        self,
        catalogue: Catalogue,
        store: Store,
        *contents: bytes,
        step: int,
        generation: int | None = None,
        run: ModelName = RUN,
        options: WriteOptions | None = None,
        **said: object,
    ) -> None:
        generation = catalogue.run(run).generation if generation is None else generation
        checkpoint = Checkpoint(step=step, generation=generation, ranks=len(contents))
        self.publication = Publication.model_validate({**said, "checkpoint": checkpoint})
        self.upload: Upload = catalogue.open_upload(run, self.publication)
        self._store = store
        self._options = options
        self._contents = contents
        self._shares: list[Share] = []

    def write(self, rank: int, upload: Upload | None = None) -> None:
        """What a rank writes, under the upload it joined; it is not finished by that."""
        data = self._contents[rank]
        split = split_state([StateTensor(f"rank{rank}", DType.U8, (len(data),))], MIB)
        writer = Writer(self._store, upload or self.upload, self._options)
        (ids,) = writer.write([Content(split, [MemorySource(data)])])
        self._shares.append(share_of(split, ids))

    def write_all(self) -> Saving:
        for rank in range(len(self._contents)):
            self.write(rank)
            self.upload.finish_rank(rank)
        return self

    def manifest(self) -> Manifest:
        return joined(self._shares, MIB)

    def commit(self, key: str | None = None) -> Version:
        said = self.publication
        return publish(self._store, self.upload, self.manifest(), said, key or self.upload.id.hex)


def save(
    catalogue: Catalogue,
    store: Store,
    *contents: bytes,
    step: int,
    **said: Any,
) -> Version:
    """Publish a checkpoint of a run that was taken over before."""
    return Saving(catalogue, store, *contents, step=step, **said).write_all().commit()
