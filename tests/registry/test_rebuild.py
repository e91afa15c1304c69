from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpointing import RUN, save
from collecting import DAY_S, pass_time
from pushing import BERT, push, read_back
from sqlalchemy import func, select

from weightyard.errors import Conflict, ForeignStore, NoSuchThing, RunTakenOver, StoreUnavailable
from weightyard.names import AliasName, Digest, ModelName, Ref
from weightyard.records import KeepBest, Publication, RebuildReport, Retention
from weightyard.registry import binding, schema
from weightyard.registry.database import Database
from weightyard.registry.rebuild import rebuild
from weightyard.registry.registry import Registry
from weightyard.settings import Settings
from weightyard.storage import layout
from weightyard.storage.local import LocalStore
from weightyard.storage.opening import open_store
from weightyard.storage.store import StagedFile, Store, StorePath
from weightyard.testing.cluster import MiniCluster

GPT = ModelName("team", "gpt")
PROD = AliasName("prod")


def noise(seed: int, length: int = 100_000) -> bytes:
    return random.Random(seed).randbytes(length)


@pytest.fixture
def empty(database: Database, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Database]:
    """Another database of the same kind, without a schema or with nothing in it."""
    if database.is_sqlite:
        url = f"sqlite:///{tmp_path}/other.db"
    else:
        url = request.getfixturevalue("postgres")()
    other = Database(url)
    yield other
    other.close()


def everything(registry: Registry) -> dict[str, Any]:
    """All that users can see of models, versions and aliases."""
    seen: dict[str, Any] = {}
    for model in registry.models(kind=None):
        name = ModelName.parse(model.name)
        seen[model.name] = model.model_dump()
        seen[f"{model.name} versions"] = [
            version.model_dump(exclude={"last_used"}) for version in registry.versions(name)
        ]
        for alias in ("prod", "next"):
            seen[f"{model.name}@{alias}"] = registry.alias_log(name, AliasName(alias))
    return seen


def live_a_little(registry: Registry, store: Store) -> None:
    """A bit of everything that can happen to models."""
    push(registry, store, noise(1), noise(2), alias="prod", message="first", metrics={"loss": 0.5})
    push(registry, store, noise(2), noise(3), parent="team/bert@v1", tags={"k": "v"})
    push(registry, store, b"tiny", message="to be removed")
    registry.move_alias(BERT, PROD, 2, reason="better", who="bob")
    registry.move_alias(BERT, AliasName("next"), 3)
    registry.move_alias(BERT, AliasName("next"), None, reason="not yet")
    registry.annotate(
        Ref.parse("team/bert@v2"), {"message": "second", "metadata": {"n": [1, None]}}
    )
    registry.remove(Ref.parse("team/bert@v3"), reason="wrong")
    registry.rollback_alias(BERT, PROD, who="carol")
    push(registry, store, noise(4), model=GPT, parent="team/bert@v2", metadata={"deep": {"x": 1}})
    push(registry, store, noise(5), model=GPT, config={"layers": 12})
    registry.keep(Ref.parse("team/gpt@v2"), copies=3, policy="HOT")
    registry.set_retention(GPT, Retention(keep_last=3, ttl_s=60))
    registry.create_model(ModelName("team", "empty"), who="dave")
    registry.create_model(ModelName("team", "mistake"))
    registry.remove_model(ModelName("team", "mistake"))
    train_a_little(registry, store)
    while registry.flush_outbox(store):
        pass


def train_a_little(registry: Registry, store: Store) -> None:
    """A run that was taken over twice, and thinned out."""
    registry.begin_generation(RUN, who="trainer")
    for step in (10, 20, 30):
        save(registry, store, noise(step), noise(step + 1), step=step, metrics={"loss": step})
    registry.begin_generation(RUN, who="trainer")
    save(registry, store, noise(20), step=20)
    best = KeepBest(metric="loss", mode="max")
    registry.set_retention(RUN, Retention(keep_last=1, keep_every=20, keep_best=best))
    registry.apply_retention(RUN)
    registry.begin_generation(RUN, who="trainer")


def test_versions_numbers_aliases_and_history_come_back_equal(
    registry: Registry, store: LocalStore, empty: Database
) -> None:
    live_a_little(registry, store)
    before = everything(registry)
    report = rebuild(store, empty)
    again = Registry(empty, who="erin")
    assert everything(again) == before
    kept = again.resolve(Ref.parse("team/gpt@v2"))
    assert kept.structure["config"] == {"layers": 12}
    assert (kept.replication, kept.policy) == (3, "HOT")
    assert (report.models, report.versions, report.alias_moves) == (4, 7, 5)
    assert (report.lost, report.damaged) == ((), ())
    assert "tokens" in report.not_kept
    binding.bind(empty, store)
    assert again.check(store, read_data=True).is_clean
    contents = read_back(again, store, again.resolve(Ref.parse("team/bert@v2")))
    assert contents == [noise(2), noise(3)]


@pytest.mark.long
@pytest.mark.cluster
def test_what_lies_in_hdfs_comes_back_equal(
    cluster: MiniCluster, database: Database, empty: Database
) -> None:
    settings = Settings(hadoop_conf_dir=cluster.conf_dir)
    with open_store(cluster.fresh_dir(), settings) as store:
        binding.bind(database, store)
        registry = Registry(database, store=store, who="alice")
        live_a_little(registry, store)
        before = everything(registry)
        report = rebuild(store, empty)
        assert (report.lost, report.damaged) == ((), ())
        binding.bind(empty, store)
        again = Registry(empty, store=store, who="erin")
        assert everything(again) == before
        contents = read_back(again, store, again.resolve(Ref.parse("team/bert@v2")))
        assert contents == [noise(2), noise(3)]
        assert push(again, store, noise(6)).ref == "team/bert@v4"


def test_life_goes_on_after_a_rebuild(
    registry: Registry, store: LocalStore, empty: Database
) -> None:
    live_a_little(registry, store)
    rebuild(store, empty)
    again = Registry(empty, who="erin")
    packs = len(list(store.list(layout.PACKS)))
    version = push(again, store, noise(1), noise(3), alias="prod")
    assert version.ref == "team/bert@v4", "the number of a removed version is not given out again"
    assert len(list(store.list(layout.PACKS))) == packs, "what is in the store was found again"
    again.move_alias(BERT, PROD, 2)
    assert again.flush_outbox(store) == 4, "no name of the old journal was used again"
    assert again.check(store).is_clean
    push(again, store, b"back", model=ModelName("team", "mistake"))
    assert again.flush_outbox(store)


def test_a_run_goes_on_after_a_rebuild_and_nobody_else_does(
    registry: Registry, store: LocalStore, empty: Database
) -> None:
    train_a_little(registry, store)
    while registry.flush_outbox(store):
        pass
    rebuild(store, empty)
    again = Registry(empty, who="erin")
    run = again.run(RUN)
    assert (run.generation, run.latest, run.latest_step, run.versions) == (3, 4, 20, 3)
    assert again.resolve(Ref.parse("team/run42@step-20")).number == 4
    with pytest.raises(RunTakenOver):
        save(again, store, b"late", step=40, generation=2)
    assert save(again, store, b"next", step=40, generation=3).number == 5
    with pytest.raises(Conflict, match="is a run"):
        push(again, store, b"plain", model=RUN)


def test_the_generation_of_a_run_is_known_by_its_checkpoints_too(
    registry: Registry, store: LocalStore, empty: Database, tmp_path: Path
) -> None:
    for _ in range(3):
        registry.begin_generation(RUN)
    save(registry, store, b"one", step=1)
    registry.flush_outbox(store)
    for file in list(store.list(layout.JOURNAL)):
        path = tmp_path / "store" / file.path.text
        if b'"published"' not in path.read_bytes():
            path.write_bytes(b"lost")
    assert len(rebuild(store, empty).lost) == 4
    again = Registry(empty)
    assert (again.model(RUN).kind, again.run(RUN).generation) == ("run", 3)


@pytest.mark.parametrize("generation", [-1, 2**53 + 1, 1.5, "2", None, [1]])
def test_a_generation_that_is_none_is_not_believed(
    registry: Registry, store: LocalStore, empty: Database, tmp_path: Path, generation: object
) -> None:
    registry.begin_generation(RUN)
    registry.flush_outbox(store)
    path = tmp_path / "store" / layout.journal(2).text
    entry = json.loads(path.read_bytes())
    assert entry["detail"] == {"generation": 1}
    path.write_text(json.dumps({**entry, "detail": {"generation": generation}}))
    (lost,) = rebuild(store, empty).lost
    assert lost.startswith(layout.journal(2).text)
    assert Registry(empty).run(RUN).generation == 0


def test_the_database_a_registry_was_rebuilt_for_is_refused_afterwards(
    registry: Registry, store: LocalStore, database: Database, empty: Database
) -> None:
    push(registry, store, noise(1))
    registry.flush_outbox(store)
    before = binding.bind(database, store)
    report = rebuild(store, empty)
    assert report.registry_id == before.registry_id
    with pytest.raises(ForeignStore, match="older copy"):
        binding.bind(database, store)
    assert binding.bind(empty, store) == before


def test_adopting_takes_a_store_over_from_another_registry(
    registry: Registry, store: LocalStore, database: Database, empty: Database
) -> None:
    push(registry, store, noise(1))
    registry.flush_outbox(store)
    before = binding.bind(database, store)
    report = rebuild(store, empty, adopt=True)
    assert report.registry_id != before.registry_id
    after = binding.bind(empty, store)
    assert (after.yard_id, after.registry_id) == (before.yard_id, report.registry_id)
    with pytest.raises(ForeignStore, match=report.registry_id):
        binding.bind(database, store)


def test_a_database_with_anything_in_it_is_refused(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    push(registry, store, noise(1))
    registry.flush_outbox(store)
    with pytest.raises(Conflict, match="empty"):
        rebuild(store, database)
    binding.bind(database, store)


def test_a_folder_without_a_yard_is_refused(empty: Database, tmp_path: Path) -> None:
    with pytest.raises(ForeignStore, match=r"yard\.json"):
        rebuild(LocalStore(tmp_path / "nothing"), empty)


def test_a_version_without_its_manifest_comes_back_damaged_and_is_healed_by_a_push(
    registry: Registry, store: LocalStore, empty: Database
) -> None:
    version = push(registry, store, noise(1), alias="prod")
    push(registry, store, noise(2))
    registry.flush_outbox(store)
    path = layout.manifest(Digest(version.digest))
    store.delete(path)
    report = rebuild(store, empty)
    assert report.damaged == (version.ref,)
    assert any(path.text in lost for lost in report.lost)
    again = Registry(empty, who="erin")
    assert again.resolve(Ref.parse("team/bert@prod")).damaged
    push(again, store, noise(1))
    back = again.resolve(Ref.parse("team/bert@prod"))
    assert not back.damaged
    assert read_back(again, store, back) == [noise(1)]


def _lose_pack(store: LocalStore, root: Path) -> str:
    (pack,) = (file.path.text for file in store.list(layout.PACKS))
    (root / pack).write_bytes(b"not a pack any more")
    return pack


def _lose_record(store: LocalStore, root: Path) -> str:
    path = layout.record(BERT, 1).text
    (root / path).write_bytes(b'{"format": 1, "version": {"model": "team/other"')
    return path


def _swap_record(store: LocalStore, root: Path) -> str:
    path = layout.record(BERT, 2).text
    (root / path).parent.mkdir(exist_ok=True)
    shutil.copy(root / layout.record(BERT, 1).text, root / path)
    return path


def _lose_journal(store: LocalStore, root: Path) -> str:
    path = max(file.path.text for file in store.list(layout.JOURNAL))
    (root / path).write_bytes(b"{}")
    return path


@pytest.mark.parametrize("lose", [_lose_pack, _lose_record, _swap_record, _lose_journal])
def test_what_cannot_be_brought_back_is_listed(
    registry: Registry,
    store: LocalStore,
    empty: Database,
    tmp_path: Path,
    lose: Callable[[LocalStore, Path], str],
) -> None:
    push(registry, store, noise(1), alias="prod")
    registry.flush_outbox(store)
    path = lose(store, tmp_path / "store")
    report = rebuild(store, empty)
    assert any(lost.startswith(f"{path}: ") for lost in report.lost)
    again = Registry(empty)
    if lose is _lose_pack:
        assert report.damaged == ("team/bert@v1",)
        assert again.resolve(Ref.parse("team/bert@v1")).damaged
    version = push(again, store, noise(1))
    assert version.number == 3 if lose is _swap_record else 2


def test_what_is_gone_from_the_journal_is_listed_as_lost_and_not_looked_for_any_more(
    registry: Registry, store: LocalStore, empty: Database
) -> None:
    push(registry, store, noise(1), alias="prod")
    push(registry, store, noise(2), alias="prod")
    registry.flush_outbox(store)
    for sequence in (1, 3, 4):
        store.delete(layout.journal(sequence))
    report = rebuild(store, empty)
    gone = "gone, with what changed then"
    assert report.lost == (
        f"{layout.journal(1)}: {gone}",
        f"{layout.journal(3)} to {layout.journal(4)}: {gone}",
    )
    again = Registry(empty)
    assert again.check(store, read_data=True).is_clean
    store.delete(layout.journal(2))
    assert [found.code for found in again.check(store).findings] == ["journal-missing"]


def test_the_history_of_aliases_outlives_the_removal_of_a_model(
    registry: Registry, store: LocalStore, empty: Database
) -> None:
    push(registry, store, noise(1), alias="prod")
    registry.move_alias(BERT, PROD, None, reason="wrong")
    registry.remove(Ref.parse("team/bert@v1"))
    registry.remove_model(BERT)
    push(registry, store, noise(2), alias="prod")
    registry.flush_outbox(store)
    moves = registry.alias_log(BERT, PROD)
    assert [(move.before, move.after) for move in moves] == [(None, 2), (1, None), (None, 1)]
    with pytest.raises(NoSuchThing):
        registry.rollback_alias(BERT, PROD)
    assert rebuild(store, empty).lost == ()
    assert Registry(empty).alias_log(BERT, PROD) == moves


def test_packs_are_kept_as_the_newest_version_asks(
    registry: Registry, store: LocalStore, empty: Database
) -> None:
    push(registry, store, noise(1))
    for policy in ("WARM", "COLD"):
        push(registry, store, noise(1), policy=policy)
    registry.flush_outbox(store)
    rebuild(store, empty)
    policies = empty.read(lambda tx: tx.scalars(select(schema.packs.c.policy)).all())
    assert policies == ["COLD"]


def test_nothing_is_taken_over_by_a_rebuild_that_fails(
    registry: Registry, store: LocalStore, database: Database, empty: Database, tmp_path: Path
) -> None:
    push(registry, store, noise(1))
    registry.flush_outbox(store)
    (tmp_path / "store/owners").write_bytes(b"in the way")
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever the store says to that
        rebuild(store, empty)
    (tmp_path / "store/owners").unlink()
    binding.bind(database, store)
    assert isinstance(rebuild(store, empty), RebuildReport), "the database is still empty"


def test_staged_files_of_writers_the_old_registry_had_are_given_to_gc(
    registry: Registry, store: LocalStore, empty: Database
) -> None:
    push(registry, store, noise(1))
    registry.flush_outbox(store)
    upload = registry.open_upload(BERT, Publication())
    with store.stage(layout.staging(upload.id, "pack")) as stage:
        stage.write(b"half")
        stage.close()
    rebuild(store, empty)
    uploads = schema.uploads
    rows = empty.read(lambda tx: tx.execute(uploads.select()).all())
    assert upload.id.hex in {row.name for row in rows if row.state == "expired"}


class _CutOff(LocalStore):
    """Gone when the store is about to say whose it is."""

    is_gone = False

    def publish(self, staged: StagedFile, path: StorePath) -> None:
        self.is_gone = path.text.startswith(layout.OWNERS.text)
        self._require_there()
        super().publish(staged, path)

    def delete(self, path: StorePath) -> bool:
        self._require_there()
        return super().delete(path)

    def _require_there(self) -> None:
        if self.is_gone:
            raise StoreUnavailable("cut off")


def test_what_a_rebuild_that_was_cut_off_left_in_staging_is_found_and_removed(
    registry: Registry, store: LocalStore, empty: Database
) -> None:
    push(registry, store, noise(1))
    registry.flush_outbox(store)
    with pytest.raises(StoreUnavailable):
        rebuild(_CutOff(store.folder), empty)
    (left,) = store.list(layout.STAGING)
    names = select(schema.uploads.c.name)
    assert left.path.text.split("/")[1] in empty.read(lambda tx: tx.scalars(names).all())
    (finding,) = registry.check(store).findings
    assert (finding.code, finding.subject) == ("unknown-file", left.path.text)
    rebuild(store, empty)
    again = Registry(empty)
    pass_time(empty, 60 * DAY_S)
    again.gc(store)
    assert list(store.list(layout.STAGING)) == []
    assert again.check(store).is_clean


def test_a_database_that_is_not_empty_is_left_as_it_was_by_a_rebuild_into_it(
    registry: Registry, store: LocalStore
) -> None:
    push(registry, store, noise(1))
    uploads = select(func.count()).select_from(schema.uploads)
    before = registry.database.read(lambda tx: tx.scalar(uploads))
    with pytest.raises(Conflict):
        rebuild(store, registry.database)
    assert registry.database.read(lambda tx: tx.scalar(uploads)) == before
