"""Read leases over REST: what a reader holds stays, and only those who may read it hold it."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator

import pytest
from service_world import LIMIT_S, World, push, push_file, served

from weightyard.client.catalogue import HttpCatalogue
from weightyard.errors import NoSuchThing, NotAllowed, Refused
from weightyard.format.manifest import from_json
from weightyard.names import FilePath, Ref
from weightyard.records import MAX_LEASE_S
from weightyard.registry.collect import GcOptions
from weightyard.transfer.catalogue import Catalogue
from weightyard.transfer.plan import Wanted

V1 = "models/team/bert/versions/1"
BERT = Ref.parse("team/bert@v1")


@pytest.fixture
def reader(any_world: World) -> Iterator[HttpCatalogue]:
    with (
        served(any_world.app) as url,
        HttpCatalogue(url, any_world.secrets["reader"], deadline_s=LIMIT_S) as client,
    ):
        yield client


def packs_deleted(world: World) -> int:
    """By collecting twice: what is condemned goes with the next."""
    options = GcOptions(grace_s=0, unsafe_grace=True)
    reports = [world.registry.gc(world.store, options) for _ in range(2)]
    return sum(report.packs_deleted for report in reports)


def test_what_a_reader_holds_through_the_service_outlives_its_version(
    any_world: World, reader: HttpCatalogue
) -> None:
    push_file(any_world, "team/bert", "w.bin", os.urandom(100_000))
    lease = reader.take_lease(BERT, "serving-7", 3600)
    assert (lease.ref, lease.holder) == ("team/bert@v1", "serving-7")
    any_world.registry.remove(BERT)
    assert packs_deleted(any_world) == 0
    assert reader.renew_lease(lease.id, 7200).until > lease.until
    assert packs_deleted(any_world) == 0
    reader.release_lease(lease.id)
    assert packs_deleted(any_world) == 1


def test_a_leased_version_is_read_to_its_end_although_it_was_removed(
    any_world: World, reader: HttpCatalogue
) -> None:
    data = os.urandom(100_000)
    push_file(any_world, "team/bert", "w.bin", data)
    version = reader.resolve(BERT)
    lease = reader.take_lease(BERT, "serving-7", 3600)
    any_world.registry.remove(BERT)
    packs_deleted(any_world)
    manifest = from_json(any_world.call("GET", f"{V1}/manifest", token="reader").content, None)
    assert reader.manifest(version) == manifest
    (block,) = (entry.id for entry in manifest.blocks)
    assert list(reader.placements([block])) == [block]
    for path in ("placements", "replicas", "locations"):
        assert any_world.call("GET", f"{V1}/{path}", token="reader").status_code == 200, path
    into = io.BytesIO()
    assert reader.fetch_file(BERT, FilePath("w.bin"), into) == len(data)
    assert into.getvalue() == data
    raw = memoryview(bytearray(len(data)))
    reader.reader(version, manifest).read([Wanted(block, 0, raw)])
    assert raw == data
    assert any_world.call("GET", V1).status_code == 404, "it is out of sight all the same"
    reader.release_lease(lease.id)
    for path in ("manifest", "placements", "files/w.bin", f"blocks/{block}"):
        assert any_world.call("GET", f"{V1}/{path}", token="reader").status_code == 404, path


def test_a_lease_that_has_ended_is_not_renewed_and_may_be_released_again(
    any_world: World, reader: HttpCatalogue
) -> None:
    push(any_world.registry, any_world.store, "team/bert", b"one")
    lease = reader.take_lease(Ref.parse("team/bert"), "serving-7", 3600)
    for _ in range(2):
        reader.release_lease(lease.id)
    with pytest.raises(NoSuchThing, match=str(lease.id)):
        reader.renew_lease(lease.id, 60)
    with pytest.raises(NoSuchThing):
        reader.take_lease(Ref.parse("team/bert@v9"), "serving-7", 60)


def test_a_lease_on_what_one_may_not_read_is_neither_taken_nor_touched(world: World) -> None:
    push(world.registry, world.store, "team/bert", b"one")
    lease = world.registry.take_lease(BERT, "serving-7", 60)
    with served(world.app) as url, HttpCatalogue(url, world.secrets["stranger"]) as stranger:
        for call in (
            lambda: stranger.take_lease(BERT, "me", 60),
            lambda: stranger.renew_lease(lease.id, 3600),
            lambda: stranger.release_lease(lease.id),
        ):
            with pytest.raises(NotAllowed):
                call()
    assert world.registry.find_lease(lease.id) == lease


@pytest.mark.parametrize(
    ("holder", "seconds"),
    [("", 60), ("x" * 201, 60), ("x", 0), ("x", -1), ("x", MAX_LEASE_S + 1), ("x", float("nan")),
     ("x", float("inf"))],
)  # fmt: skip
def test_registry_and_client_refuse_the_same_leases(
    world: World, url: str, holder: str, seconds: float
) -> None:
    push(world.registry, world.store, "team/bert", b"one")
    with HttpCatalogue(url, world.secrets["reader"]) as client:
        both: list[Catalogue] = [world.registry, client]
        for catalogue in both:
            with pytest.raises(Refused):
                catalogue.take_lease(BERT, holder, seconds)


@pytest.mark.parametrize("lease", ["x", "-1", "1.5", "9" * 19, "٣", "0"])
def test_what_is_no_lease_is_told_so(world: World, lease: str) -> None:
    answer = world.call("DELETE", f"leases/{lease}")
    assert answer.status_code in (400, 404)
    assert answer.json()["code"] in ("invalid-name", "no-such-thing")
