"""From HDFS into tensors by `Yard.load`, all of them, half of them, one by one; and the peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from bench.models import PEER_LOADS
from bench.prepared import FOLDER, PLANES, RAW, NotToBeHad, Prepared, pushed
from bench.reads import HERE
from bench.rows import Planned, measure
from bench.samples import Kind, Row
from bench.site import Site

NORMAL, TRAINED = "N(0, 0.02)", "trained (CREPE)"
WHOLE, HALF = "all of it", "half of every tensor"


def run_load(
    site: Site, length: int, repeat: int, done: Callable[[Row], object]
) -> tuple[Row, ...]:
    """Raw and planes against every peer; the same with trained weights."""
    rows: tuple[Row, ...] = ()
    for group in (NORMAL, TRAINED):
        try:
            with pushed(site, length, RAW, PLANES, is_trained=group is TRAINED) as model:
                planned = [_load(model, codec, codec, group) for codec in (RAW, PLANES)]
                planned += _peers(site, model, group)
                planned += _here(planned, group)
                rows += measure(site, planned, repeat, done)
        except NotToBeHad as why:
            rows += (Row(Kind.OURS, "weightyard", RAW, length, failed=str(why), group=group),)
    return rows


def _here(planned: Sequence[Planned], group: str) -> list[Planned]:
    """Those who can take the short circuit, once more, and taking it."""
    return [
        replace(one, row=msgspec.structs.replace(one.row, group=f"{group}, {HERE}"), here=True)
        for one in planned
        if one.row.who in ("weightyard", "pyarrow with libhdfs")
    ]


def run_rank(
    site: Site, length: int, repeat: int, done: Callable[[Row], object]
) -> tuple[Row, ...]:
    """What a rank of two loads, which takes half of every tensor along its first dimension."""
    with pushed(site, length, RAW, PLANES) as model:
        planned = []
        for codec in (RAW, PLANES):
            half = _load(model, codec, HALF, codec, is_half=True)
            row = msgspec.structs.replace(half.row, moved_bytes=model.length // 2)
            options = {name: value for name, value in half.options.items() if name != "digest"}
            planned += [_load(model, codec, WHOLE, codec), Planned(row, half.task, options)]
        return measure(site, planned, repeat, done)


def run_stream(
    site: Site, length: int, repeat: int, done: Callable[[Row], object]
) -> tuple[Row, ...]:
    """When the first tensor of a stream is there, and when the last."""
    with pushed(site, length, RAW, PLANES) as model:
        planned = []
        for codec in (RAW, PLANES):
            row = Row(Kind.OURS, "weightyard", "stream", model.length, group=codec, is_fresh=True)
            options = {**model.yards[codec], "digest": model.digest}
            planned += [_load(model, codec, "load", codec), Planned(row, "yards.stream", options)]
        return measure(site, planned, repeat, done)


def _load(model: Prepared, codec: str, way: str, group: str, **options: Any) -> Planned:
    row = Row(Kind.OURS, "weightyard", way, model.length, group=group, is_fresh=True)
    return Planned(row, "yards.load", {**model.yards[codec], "digest": model.digest, **options})


def _peers(site: Site, model: Prepared, group: str) -> list[Planned]:
    """Each reads a file of its own kind; the limit is a socket with nothing to do but receive."""
    saved = model.source.parent / "model.pt"
    save = {"file": str(model.file), "to": str(saved), "is_repeatable": False}
    site.run_child("models.save_torch", save)
    in_hdfs = {}
    for file in (model.file, saved):
        in_hdfs[file] = f"{FOLDER}/{file.name}"
        put = {"file": str(file), "path": in_hdfs[file], "replication": 1, "is_repeatable": False}
        site.run_child("models.write_stream", put)

    def peer(who: str, way: str, task: str, file: Path, **more: Any) -> Planned:
        row = Row(Kind.PEER, who, way, model.length, group=group, is_fresh=True)
        read = {"path": in_hdfs[file], "length": file.stat().st_size, "digest": model.digest}
        return Planned(row, task, {**read, **more})

    planned = [peer(who, way, task, model.file, **more) for who, way, task, more in PEER_LOADS]
    planned.append(peer("hdfs (WebHDFS)", "torch.load", "models.load_torch", saved))
    for streams in (1, 4):
        way = f"sendfile, {streams} stream{'s' * (streams > 1)}"
        row = Row(Kind.LIMIT, "loopback socket", way, model.length, group=group, is_fresh=True)
        limit = {"length": model.length, "streams": streams, "by_sendfile": True, "is_fresh": True}
        planned.append(Planned(row, "loopback", limit))
    return planned
