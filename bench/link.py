"""Loading over a link narrower than this machine's: what planes save there, and until when."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from bench.prepared import PLANES, RAW, pushed
from bench.rows import Planned, measure
from bench.samples import MB, Kind, Row
from bench.shaping import narrow_link
from bench.site import Site
from bench.worker import Action, Prepare
from bench.yards import MODEL, Load, opened, settings_in
from weightyard.format.block import DEFAULT_BLOCK_BYTES
from weightyard.storage.deadline import Deadline
from weightyard.storage.hdfs.configuration import Cluster
from weightyard.storage.hdfs.namenode import Locator, NameNode
from weightyard.storage.opening import open_store
from weightyard.storage.store import Location, StorePath
from weightyard.yard import Yard

RATES_MB_S = (100, 400, 1000)


def group_of(rate_mb_s: int) -> str:
    return f"{rate_mb_s} MB/s"


@dataclass(frozen=True, slots=True)
class Through:
    """A NameNode in whose answers the proxies stand for the DataNodes."""

    namenode: Locator
    proxies: Mapping[str, str]

    def locate(self, path: StorePath, deadline: Deadline) -> Location:
        location = self.namenode.locate(path, deadline)
        return replace(
            location,
            spans=tuple(
                replace(
                    span,
                    replicas=tuple(
                        replace(one, datanode=self.proxies[one.datanode]) for one in span.replicas
                    ),
                )
                for span in location.spans
            ),
        )


def load(site: Site, *, url: str, folder: str, proxies: Mapping[str, str]) -> Action:
    settings = settings_in(folder)
    namenode = NameNode(Cluster.of(url, settings))
    store = open_store(url, settings, locator=Through(namenode, proxies))
    catalogue = opened(url, folder).catalogue
    yard = Yard(store, catalogue, block_bytes=DEFAULT_BLOCK_BYTES, settings=settings, name=url)
    return Load(yard, MODEL)


TASKS: Mapping[str, Prepare] = {"link.load": load}


def run(site: Site, length: int, repeat: int, done: Callable[[Row], object]) -> tuple[Row, ...]:
    rows: tuple[Row, ...] = ()
    with pushed(site, length, RAW, PLANES) as model:
        for rate in RATES_MB_S:
            with narrow_link(rate * MB, site.datanodes) as proxies:
                planned = [
                    Planned(
                        Row(Kind.OURS, "weightyard", codec, model.length, group=group_of(rate)),
                        "link.load",
                        {**model.yards[codec], "proxies": proxies, "digest": model.digest},
                    )
                    for codec in (RAW, PLANES)
                ]
                rows += measure(site, planned, repeat, done)
    return rows
