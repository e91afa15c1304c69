"""Read leases over REST: what a reader holds stays, and only those who may read it hold it."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator

import httpx
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


def test_a_lease_on_what_one_may_not_read_is_not_taken(world: World, url: str) -> None:
    push(world.registry, world.store, "team/bert", b"one")
    with HttpCatalogue(url, world.secrets["stranger"]) as stranger, pytest.raises(NotAllowed):
        stranger.take_lease(BERT, "me", 60)


def touched(world: World, token: str, lease: int | str) -> list[httpx.Response]:
    """What one is told who wants to renew a lease, and to end it."""
    path = f"leases/{lease}"
    return [
        world.call("PUT", path, token=token, json={"seconds": 3600}),
        world.call("DELETE", path, token=token),
    ]


@pytest.mark.parametrize("other", ["writer", "stranger"])
def test_a_lease_of_somebody_else_is_as_if_it_were_not_there(
    any_world: World, reader: HttpCatalogue, other: str
) -> None:
    push(any_world.registry, any_world.store, "team/bert", b"one")
    lease = reader.take_lease(BERT, "serving-7", 60)
    assert lease.author == "reader"
    for mine, missing in zip(
        touched(any_world, other, lease.id), touched(any_world, other, 10**9), strict=True
    ):
        assert mine.status_code == missing.status_code == 404
        told = mine.json()
        assert told.items() >= {"code": "no-such-thing"}.items()
        assert told["detail"].replace(str(lease.id), str(10**9)) == missing.json()["detail"]
    assert any_world.registry.find_lease(lease.id) == lease


@pytest.mark.parametrize("admin", ["boss", "lead"])
def test_an_admin_of_its_project_may_renew_and_end_any_lease(
    any_world: World, reader: HttpCatalogue, admin: str
) -> None:
    push(any_world.registry, any_world.store, "team/bert", b"one")
    push(any_world.registry, any_world.store, "other/bert", b"two")
    theirs = any_world.registry.take_lease(Ref.parse("other/bert"), "serving-8", 60)
    lease = reader.take_lease(BERT, "serving-7", 60)
    assert [answer.status_code for answer in touched(any_world, admin, lease.id)] == [200, 204]
    with pytest.raises(NoSuchThing):
        reader.renew_lease(lease.id, 60)
    elsewhere = {answer.status_code for answer in touched(any_world, "lead", theirs.id)}
    assert elsewhere == {404}, "an admin of one project is none of the other"


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
