from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from collecting import DAY_S, gc, pass_time, states
from pushing import BERT, push, push_delta, read_back
from sqlalchemy import delete, select, update

from weightyard.errors import Damaged, FileMissing, ManifestInvalid, StoreUnavailable
from weightyard.format.block import block_id
from weightyard.names import Digest, Ref, UploadId
from weightyard.records import CheckReport
from weightyard.registry import check, history, outbox, schema
from weightyard.registry.database import Database
from weightyard.registry.examine import Examined
from weightyard.registry.registry import Registry
from weightyard.registry.schema import FileState
from weightyard.storage import layout
from weightyard.storage.local import LocalStore
from weightyard.storage.store import Location, StorePath
from weightyard.transfer.once import read_whole

KIB = 1024


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def noise(seed: int, length: int = 200 * KIB) -> bytes:
    return random.Random(seed).randbytes(length)


def the_pack(store: LocalStore) -> StorePath:
    (pack,) = store.list(layout.PACKS)
    return pack.path


def codes(report: CheckReport) -> set[tuple[str, str]]:
    return {(finding.code, finding.subject) for finding in report.findings}


def flip(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 0x40
    file.write_bytes(data)


def test_a_yard_that_is_well_has_no_findings(registry: Registry, store: LocalStore) -> None:
    push(registry, store, noise(1), noise(2), alias="prod")
    push(registry, store, noise(2), b"small")
    assert registry.check(store).is_clean, "records that are still in the outbox are not missing"
    registry.flush_outbox(store)
    report = registry.check(store, read_data=True)
    assert report.is_clean
    assert (report.packs, report.manifests) == (2, 2)
    packs = sum(file.length for file in store.list(layout.PACKS))
    manifests = sum(file.length for file in store.list(layout.MANIFESTS))
    assert report.stored_bytes == packs + manifests
    assert report.read_bytes >= report.stored_bytes, "every byte was read"


def test_a_missing_pack_is_found_with_the_versions_it_touches(
    registry: Registry, store: LocalStore
) -> None:
    whole = push(registry, store, noise(1))
    there = the_pack(store)
    broken = push(registry, store, noise(1), noise(2))
    (lost,) = {file.path for file in store.list(layout.PACKS)} - {there}
    store.delete(lost)
    report = registry.check(store)
    assert codes(report) == {("missing", lost.text)}
    assert report.findings[0].versions == (broken.ref,)
    assert report.damaged_versions == (broken.ref,)
    assert registry.resolve(Ref.parse(broken.ref)).damaged
    assert not registry.resolve(Ref.parse(whole.ref)).damaged
    with pytest.raises(Damaged):
        read_back(registry, store, broken)
    assert read_back(registry, store, whole) == [noise(1)]


def test_a_short_pack_is_found(registry: Registry, store: LocalStore, root: Path) -> None:
    version = push(registry, store, noise(1))
    pack = root / the_pack(store).text
    pack.write_bytes(pack.read_bytes()[:-100])
    report = registry.check(store)
    assert codes(report) == {("short", the_pack(store).text)}
    assert registry.resolve(Ref.parse(version.ref)).damaged


@pytest.mark.parametrize("where", ["header", "block", "padding", "footer", "trailer"])
def test_reading_all_data_finds_a_wrong_byte_anywhere_in_a_pack(
    registry: Registry, store: LocalStore, root: Path, where: str
) -> None:
    version = push(registry, store, noise(1, 200 * KIB + 5))
    pack = root / the_pack(store).text
    length = pack.stat().st_size
    offset = {
        "header": 12,
        "block": 1000,
        "padding": 16 + 200 * KIB + 6,
        "footer": length - 60,
        "trailer": length - 30,
    }[where]
    flip(pack, offset)
    assert registry.check(store).is_clean, "without reading there is nothing to see"
    report = registry.check(store, read_data=True)
    (finding,) = report.findings
    assert finding.versions == (version.ref,)
    if where in ("block", "padding"):
        assert finding.code == "damaged"
        assert registry.resolve(Ref.parse(version.ref)).damaged
    else:
        assert finding.code == "replica-damaged", "its blocks are well"
        assert read_back(registry, store, version) == [noise(1, 200 * KIB + 5)]


def test_a_damaged_pack_is_neither_read_nor_claimed_and_a_push_of_the_same_content_heals(
    registry: Registry, store: LocalStore, database: Database, root: Path
) -> None:
    first = push(registry, store, noise(1), noise(2))
    bad = the_pack(store)
    flip(root / bad.text, 1000)
    registry.check(store, read_data=True)
    with pytest.raises(FileMissing):
        read_back(registry, store, first)
    again = push(registry, store, noise(1), noise(2))
    assert again.digest == first.digest
    assert len(list(store.list(layout.PACKS))) == 2, "nothing of the damaged pack was reused"
    assert not registry.resolve(Ref.parse(first.ref)).damaged
    assert read_back(registry, store, first) == [noise(1), noise(2)]
    assert registry.check(store, read_data=True).is_clean, "the damaged one only waits for gc"
    assert states(database) == ["damaged", "live"]
    pass_time(database, 8 * DAY_S)
    registry.gc(store)
    assert the_pack(store) != bad
    assert read_back(registry, store, first) == [noise(1), noise(2)]


def test_a_damaged_delta_whose_block_lies_whole_elsewhere_only_waits_for_gc(
    registry: Registry, store: LocalStore, database: Database, root: Path
) -> None:
    base = noise(1)
    delta = bytes(100) + base[100:]
    push(registry, store, base)
    first = the_pack(store)
    version = push_delta(registry, store, delta, base)
    (bad,) = {file.path for file in store.list(layout.PACKS)} - {first}
    flip(root / bad.text, 20)
    assert codes(registry.check(store, read_data=True)) == {("damaged", bad.text)}
    push(registry, store, delta)
    assert registry.check(store, read_data=True).is_clean
    pass_time(database, 8 * DAY_S)
    registry.gc(store)
    assert not (root / bad.text).exists()
    assert read_back(registry, store, version) == [delta]


def test_good_blocks_of_a_damaged_pack_are_saved_into_a_new_one(
    registry: Registry, store: LocalStore, root: Path
) -> None:
    shared = push(registry, store, noise(1), noise(2))
    only_good = push(registry, store, noise(2))
    bad = the_pack(store)
    flip(root / bad.text, 1000)
    report = registry.check(store, read_data=True)
    assert set(report.damaged_versions) == {shared.ref, only_good.ref}
    healed = registry.heal(store, report)
    assert [finding.subject for finding in healed.left] == [bad.text], "one block is lost"
    assert read_back(registry, store, only_good) == [noise(2)]
    assert registry.check(store, read_data=True).damaged_versions == (shared.ref,)


def test_a_pack_whose_footer_is_wrong_is_written_anew(
    registry: Registry, store: LocalStore, root: Path
) -> None:
    version = push(registry, store, noise(1), noise(2))
    bad = the_pack(store)
    flip(root / bad.text, (root / bad.text).stat().st_size - 30)
    report = registry.check(store, read_data=True)
    assert registry.heal(store, report).healed == (bad.text,)
    assert read_back(registry, store, version) == [noise(1), noise(2)]
    assert not registry.resolve(Ref.parse(version.ref)).damaged
    pack_names = {file.path for file in store.list(layout.PACKS)}
    (fresh,) = pack_names - {bad}
    (root / bad.text).unlink()
    assert read_back(registry, store, version) == [noise(1), noise(2)], f"it lies in {fresh} now"


def test_a_file_that_comes_back_is_well_again(
    registry: Registry, store: LocalStore, root: Path
) -> None:
    version = push(registry, store, noise(1))
    pack = root / the_pack(store).text
    content = pack.read_bytes()
    pack.unlink()
    assert registry.check(store).damaged_versions == (version.ref,)
    pack.write_bytes(content)
    assert registry.check(store).is_clean
    assert not registry.resolve(Ref.parse(version.ref)).damaged


def test_a_damaged_manifest_is_found_and_healed_by_a_push_of_the_same_content(
    registry: Registry, store: LocalStore, root: Path
) -> None:
    version = push(registry, store, noise(1))
    path = layout.manifest(Digest(version.digest))
    flip(root / path.text, 20)
    with pytest.raises(ManifestInvalid):
        read_back(registry, store, version)
    report = registry.check(store, read_data=True)
    assert codes(report) == {("damaged", path.text)}
    assert registry.resolve(Ref.parse(version.ref)).damaged
    assert report.findings[0].advice.startswith("run `weightyard check --heal`")
    with pytest.raises(ManifestInvalid, match="run `weightyard check --heal`, then push again"):
        push(registry, store, noise(1))
    assert [left.subject for left in registry.heal(store, report).left] == [path.text]
    assert len(list(store.list(layout.DAMAGED))) == 1, "set aside, not deleted"
    push(registry, store, noise(1))
    assert read_back(registry, store, version) == [noise(1)]
    assert not registry.resolve(Ref.parse(version.ref)).damaged
    registry.flush_outbox(store)
    assert registry.check(store, read_data=True).is_clean


def test_a_manifest_that_was_set_aside_while_good_is_put_back(
    registry: Registry, store: LocalStore, root: Path
) -> None:
    version = push(registry, store, noise(1))
    path = layout.manifest(Digest(version.digest))
    (root / "damaged").mkdir()
    (root / path.text).rename(root / layout.set_aside(path, 0).text)
    report = registry.check(store)
    assert codes(report) == {("missing", path.text)}
    assert registry.heal(store, report).healed == (path.text,)
    assert registry.check(store).is_clean
    assert read_back(registry, store, version) == [noise(1)]


def test_a_file_without_a_row_is_reported_and_left_alone(
    registry: Registry, store: LocalStore, root: Path
) -> None:
    push(registry, store, noise(1))
    strays = ["packs/aa/" + "a" * 32, "packs/loose", "manifests/bb/" + "b" * 64, "packs/zz/deep/x"]
    strays += ["models/loose", "models/team/bert/notes.txt", "journal/copy.json"]
    strays += ["notes.txt", "copied/packs/aa/deep"]
    for stray in strays:
        (root / stray).parent.mkdir(parents=True, exist_ok=True)
        (root / stray).write_bytes(b"whose?")
    report = registry.check(store)
    assert codes(report) == {("unknown-file", stray) for stray in strays}
    registry.heal(store, report)
    assert all((root / stray).exists() for stray in strays)


def test_what_a_doctor_that_was_killed_left_is_reported_as_such(
    registry: Registry, store: LocalStore
) -> None:
    with store.stage(layout.probe(UploadId.new())) as stage:
        stage.write(b"?")
        left = stage.close()
    (finding,) = registry.check(store).findings
    assert (finding.code, finding.subject) == ("unknown-file", left.path.text)
    assert "doctor" in finding.advice


def test_a_large_yard_is_checked_folder_by_folder(
    registry: Registry, store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightyard.registry.check._AT_ONCE", 1)
    versions = [push(registry, store, noise(i)) for i in range(3)]
    lost = max(file.path for file in store.list(layout.PACKS))
    store.delete(lost)
    (root / "packs/loose").write_bytes(b"whose?")
    report = registry.check(store)
    assert codes(report) == {("missing", lost.text), ("unknown-file", "packs/loose")}
    assert (report.packs, len(report.damaged_versions), len(versions)) == (3, 1, 3)


def test_a_record_that_is_gone_is_written_again(registry: Registry, store: LocalStore) -> None:
    version = push(registry, store, noise(1))
    registry.flush_outbox(store)
    path = layout.record(BERT, 1)
    store.delete(path)
    report = registry.check(store)
    assert codes(report) == {("record-missing", path.text)}
    assert report.findings[0].versions == (version.ref,)
    registry.heal(store, report)
    assert registry.check(store).is_clean
    assert store.stat(path).length


@pytest.mark.parametrize(
    "content", [b"", b'{"format":1,"version":{"mod', b'{"format":1,"version":{}}']
)
def test_reading_all_data_finds_a_record_that_cannot_be_read_and_healing_writes_it_again(
    registry: Registry, store: LocalStore, root: Path, content: bytes
) -> None:
    version = push(registry, store, noise(1))
    push(registry, store, noise(2))
    registry.flush_outbox(store)
    path = layout.record(BERT, 1)
    before = read_whole(store, path)
    (root / path.text).write_bytes(content)
    assert registry.check(store).is_clean == bool(content), "an empty file is seen at once"
    report = registry.check(store, read_data=True)
    assert codes(report) == {("record-damaged", path.text)}
    assert report.findings[0].versions == (version.ref,)
    assert registry.heal(store, report).left == ()
    assert registry.check(store, read_data=True).is_clean
    assert read_whole(store, path) == before
    (aside,) = store.list(layout.DAMAGED)
    assert read_whole(store, aside.path) == content, "nothing is lost"


def test_reading_all_data_finds_a_record_that_tells_of_other_content(
    registry: Registry, store: LocalStore, root: Path
) -> None:
    version = push(registry, store, noise(1))
    registry.flush_outbox(store)
    path = layout.record(BERT, 1)
    other = read_whole(store, path).replace(version.digest.encode(), b"0" * 64)
    (root / path.text).write_bytes(other)
    report = registry.check(store, read_data=True)
    assert codes(report) == {("record-different", path.text)}
    assert registry.heal(store, report).left == report.findings
    assert read_whole(store, path) == other, "nobody else's file is touched"


def test_a_journal_entry_that_is_gone_is_found(registry: Registry, store: LocalStore) -> None:
    push(registry, store, noise(1), alias="prod")
    assert registry.check(store).is_clean, "entries that are still in the outbox are not missing"
    registry.flush_outbox(store)
    first, *_, last = sorted(file.path.text for file in store.list(layout.JOURNAL))
    store.delete(StorePath(first))
    store.delete(StorePath(last))
    report = registry.check(store)
    assert codes(report) == {("journal-missing", first), ("journal-missing", last)}
    assert registry.heal(store, report).left == report.findings, "only the store had them"


def test_reading_all_data_finds_a_journal_entry_that_cannot_be_read(
    registry: Registry, store: LocalStore, root: Path
) -> None:
    push(registry, store, noise(1), alias="prod")
    registry.flush_outbox(store)
    first, second, *_ = sorted(file.path.text for file in store.list(layout.JOURNAL))
    (root / first).write_bytes(b"{half")
    (root / second).write_bytes(read_whole(store, layout.journal(3)))
    assert registry.check(store).is_clean, "without reading there is nothing to see"
    report = registry.check(store, read_data=True)
    assert codes(report) == {("journal-damaged", first), ("journal-damaged", second)}
    assert (root / first).read_bytes() == b"{half"


def test_a_record_that_is_back_is_not_written_again(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    version = push(registry, store, noise(1))
    registry.flush_outbox(store)
    store.delete(layout.record(BERT, 1))
    report = registry.check(store)
    registry.heal(store, report)
    registry.annotate(Ref.parse(version.ref), {"message": "changed since"})
    assert registry.heal(store, report).left == ()
    assert outbox.waiting(database) == 0


def test_a_record_of_the_same_version_keeps_nothing_from_being_written(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    """Two who heal at once both put a record here; the version may change between them."""
    ref = Ref.parse(push(registry, store, noise(1)).ref)
    registry.flush_outbox(store)
    before = read_whole(store, layout.record(BERT, 1))
    changed = registry.annotate(ref, {"message": "changed since"})
    database.write(lambda tx: outbox.put_record(tx, changed))
    push(registry, store, noise(2))
    registry.flush_outbox(store)
    assert outbox.waiting(database) == 0
    assert store.stat(layout.record(BERT, 2)).length
    assert read_whole(store, layout.record(BERT, 1)) == before, "the journal tells the rest"


def test_a_record_of_another_version_under_the_same_name_holds_up_no_other_and_is_told(
    registry: Registry, store: LocalStore, database: Database, root: Path
) -> None:
    version = push(registry, store, noise(1))
    registry.flush_outbox(store)
    path = layout.record(BERT, 1)
    before = read_whole(store, path)
    other = version.model_copy(update={"digest": "0" * 64})
    database.write(lambda tx: outbox.put_record(tx, other))
    push(registry, store, noise(2))
    for _ in range(2):
        registry.flush_outbox(store)
    assert store.stat(layout.record(BERT, 2)).length
    assert outbox.waiting(database) == 0
    report = registry.check(store)
    assert codes(report) == {("record-blocked", path.text)}
    assert "tells something else" in report.findings[0].detail
    assert "move the file away" in report.findings[0].advice
    assert registry.heal(store, report).left == report.findings
    assert read_whole(store, path) == before, "nobody else's file is touched"
    (root / path.text).rename(root.parent / "elsewhere.json")
    assert registry.heal(store, registry.check(store)).left == ()
    assert registry.check(store).is_clean
    assert history.read_record(store, path).version["digest"] == "0" * 64


@pytest.mark.parametrize("kind", ["record", "journal"])
def test_an_entry_whose_file_cannot_be_read_holds_up_no_other_and_is_healed(
    registry: Registry, store: LocalStore, database: Database, root: Path, kind: str
) -> None:
    push(registry, store, noise(1))
    paths = database.read(lambda tx: tx.scalars(select(schema.outbox.c.path)).all())
    begins = "models/" if kind == "record" else "journal/"
    path = next(StorePath(path) for path in paths if path.startswith(begins))
    (root / path.text).parent.mkdir(parents=True, exist_ok=True)
    (root / path.text).write_bytes(b"{half")
    registry.flush_outbox(store)
    assert outbox.waiting(database) == 0
    assert all(store.stat(StorePath(other)).length for other in paths)
    report = registry.check(store)
    assert codes(report) == {("record-blocked", path.text)}
    assert "check --heal" in report.findings[0].advice
    assert registry.heal(store, report).left == ()
    assert registry.check(store).is_clean
    read = history.read_record if kind == "record" else history.read_entry
    assert read(store, path).format == 1
    (aside,) = store.list(layout.DAMAGED)
    assert read_whole(store, aside.path) == b"{half", "nothing is lost"


class SilentAbout(LocalStore):
    """A store of which one file's DataNodes are away."""

    def __init__(self, path: StorePath, root: Path) -> None:
        super().__init__(root)
        self._path = path

    def locate(self, path: StorePath, *, timeout_s: float | None = None) -> Location:
        if path == self._path:
            raise StoreUnavailable("no DataNode has it now")
        return super().locate(path, timeout_s=timeout_s)


def test_an_entry_whose_file_does_not_answer_is_tried_again_and_holds_up_no_other(
    registry: Registry, store: LocalStore, database: Database, root: Path
) -> None:
    version = push(registry, store, noise(1))
    registry.flush_outbox(store)
    database.write(lambda tx: outbox.put_record(tx, version))
    push(registry, store, noise(2))
    path = layout.record(BERT, 1)
    with pytest.raises(StoreUnavailable):
        registry.flush_outbox(SilentAbout(path, root))
    assert store.stat(layout.record(BERT, 2)).length
    assert outbox.waiting(database) == 1
    registry.flush_outbox(store)
    assert outbox.waiting(database) == 0
    assert registry.check(store).is_clean


def test_a_store_that_knows_more_than_the_database_is_noticed(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    push(registry, store, noise(1), alias="prod")
    registry.flush_outbox(store)
    forget = update(schema.models).values(last_number=0)
    database.write(lambda tx: tx.execute(forget))
    assert ("unknown-record", layout.record(BERT, 1).text) in codes(registry.check(store))


def test_what_is_removed_or_being_written_is_no_finding(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    version = push(registry, store, noise(1))
    registry.flush_outbox(store)
    gone = update(schema.packs).values(state=FileState.DELETING)
    registry.remove(Ref.parse(version.ref))
    database.write(lambda tx: tx.execute(gone))
    store.delete(the_pack(store))
    assert registry.check(store).is_clean


def test_a_condemned_pack_that_is_damaged_is_not_brought_back_by_a_claim(
    registry: Registry, store: LocalStore, database: Database, root: Path
) -> None:
    push(registry, store, noise(1))
    condemned = update(schema.packs).values(state=FileState.CONDEMNED)
    database.write(lambda tx: tx.execute(condemned))
    flip(root / the_pack(store).text, 1000)
    registry.check(store, read_data=True)
    version = push(registry, store, noise(1))
    assert read_back(registry, store, version) == [noise(1)]
    states = database.read(lambda tx: tx.scalars(select(schema.packs.c.state)).all())
    assert sorted(states) == [FileState.DAMAGED, FileState.LIVE]


def test_records_that_wait_for_long_are_found_and_written_by_healing(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    push(registry, store, b"one")
    o = schema.outbox
    database.write(lambda tx: tx.execute(update(o).values(created_ms=o.c.created_ms - 590_000)))
    assert registry.check(store).is_clean
    database.write(lambda tx: tx.execute(update(o).values(created_ms=o.c.created_ms - 20_000)))
    report = registry.check(store)
    (finding,) = report.findings
    assert finding.code == "records-late"
    assert "for 10 minutes" in finding.detail
    assert registry.heal(store, report).left == ()
    assert registry.check(store).is_clean


def test_a_version_whose_blocks_lie_in_no_pack_is_found(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    base = noise(1)
    delta = bytes(100) + base[100:]
    first = push(registry, store, base)
    second = push_delta(registry, store, delta, base)
    whole = push(registry, store, noise(2))
    p, b = schema.placements, schema.blocks
    of_base = select(b.c.id).where(b.c.hash == block_id(base).raw).scalar_subquery()
    database.write(lambda tx: tx.execute(delete(p).where(p.c.block_id == of_base)))
    report = registry.check(store)
    assert codes(report) == {("block-missing", first.ref), ("block-missing", second.ref)}
    assert {finding.versions for finding in report.findings} == {(first.ref,), (second.ref,)}
    assert whole.ref not in report.damaged_versions
    assert registry.heal(store, report).left == report.findings
    push(registry, store, base)
    assert registry.check(store).is_clean


def test_a_pack_that_gc_rewrites_before_it_is_read_is_no_finding(
    registry: Registry, store: LocalStore, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(5):
        push(registry, store, noise(seed))
    examine = check.PACKS.examine

    def examine_after_gc(*asked: Any) -> Examined:
        if "deleting" not in states(database):
            gc(registry, store, grace_s=DAY_S)
        return examine(*asked)

    monkeypatch.setattr(check, "_THREADS", 1)
    monkeypatch.setattr(check, "PACKS", replace(check.PACKS, examine=examine_after_gc))
    assert registry.check(store, read_data=True).is_clean
    assert states(database) == ["deleting"] * 5 + ["live"]
