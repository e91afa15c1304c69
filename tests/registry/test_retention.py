from __future__ import annotations

import json

import pytest
from collecting import DAY_S, gc, noise, pass_time
from pushing import BERT, push, read_back
from pydantic import ValidationError
from sqlalchemy import event, select, update

from weightyard.names import AliasName, ModelName, Ref
from weightyard.records import Retention
from weightyard.registry import retention, schema
from weightyard.registry.collect import GcOptions
from weightyard.registry.database import Database
from weightyard.registry.registry import Registry
from weightyard.storage.local import LocalStore


def numbers(registry: Registry, model: ModelName = BERT) -> list[int]:
    return [version.number for version in registry.versions(model)]


TABLE = {
    Retention(): [4, 3, 2, 1],
    Retention(keep_last=3): [4, 3, 2],
    Retention(keep_last=1): [4],
    Retention(keep_last=9): [4, 3, 2, 1],
    Retention(ttl_s=10 * DAY_S): [4, 3, 2, 1],
    Retention(ttl_s=2 * DAY_S): [4, 3],
    Retention(ttl_s=0): [4],
    Retention(keep_last=3, ttl_s=0): [4, 3, 2],
    Retention(keep_last=1, ttl_s=2 * DAY_S): [4, 3],
}


def test_rules_keep_what_any_of_them_keeps_and_always_the_newest(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    models = {ModelName("team", f"m{row}"): rules for row, rules in enumerate(TABLE)}
    for day in range(4):
        for model in models:
            push(registry, store, b"%d" % day, model=model)
        pass_time(database, 0.9 * DAY_S)
    for model, rules in models.items():
        registry.set_retention(model, rules)
    report = gc(registry, store, grace_s=DAY_S, rewrites=False)
    assert {rules: numbers(registry, model) for model, rules in models.items()} == TABLE
    gone = [item for item in report.items if item.kind == "version"]
    assert len(gone) == report.versions_removed == sum(4 - len(kept) for kept in TABLE.values())
    assert all(item.why.startswith("retention: not ") for item in gone)


def test_aliases_parents_and_readers_are_never_removed_by_rules(
    registry: Registry, store: LocalStore
) -> None:
    push(registry, store, b"one", alias="prod")
    push(registry, store, b"two")
    push(registry, store, b"three")
    push(registry, store, b"four")
    push(registry, store, b"five")
    push(registry, store, b"child", model=ModelName("team", "tuned"), parent="team/bert@v2")
    lease = registry.take_lease(Ref.parse("team/bert@v3"), "serving", 60)
    registry.set_retention(BERT, Retention(keep_last=1))
    gc(registry, store)
    assert numbers(registry) == [5, 3, 2, 1]
    registry.release_lease(lease.id)
    registry.move_alias(BERT, AliasName("prod"), 5)
    registry.remove(Ref.parse("team/tuned@v1"))
    gc(registry, store)
    assert numbers(registry) == [5]


def test_a_line_of_descent_goes_from_its_young_end(registry: Registry, store: LocalStore) -> None:
    push(registry, store, b"1")
    push(registry, store, b"2", parent="team/bert@v1")
    push(registry, store, b"3", parent="team/bert@v2")
    push(registry, store, b"4")
    registry.set_retention(BERT, Retention(keep_last=1))
    assert gc(registry, store).versions_removed == 3
    assert numbers(registry) == [4]


def test_use_counts_for_the_time_to_live(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    for data in (noise(1), noise(2), noise(3)):
        push(registry, store, data)
    registry.set_retention(BERT, Retention(ttl_s=2 * DAY_S))
    pass_time(database, 1.5 * DAY_S)
    registry.mark_used(Ref.parse("team/bert@v1"))
    pass_time(database, 1 * DAY_S)
    gc(registry, store)
    assert numbers(registry) == [3, 1]
    used = registry.resolve(Ref.parse("team/bert@v1"))
    assert read_back(registry, store, used) == [noise(1)]


def test_removals_by_rules_are_in_journal_and_audit(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    push(registry, store, b"one")
    push(registry, store, b"two")
    registry.set_retention(BERT, Retention(keep_last=1))
    gc(registry, store)
    audit = schema.audit
    entry = database.read(
        lambda tx: tx.execute(select(audit).where(audit.c.action == "version.removed")).one()
    )
    assert (entry.subject, entry.who) == ("team/bert@v1", "alice")
    assert entry.detail["reason"] == "retention: not among the 1 newest"
    assert registry.flush_outbox(store) == 0, "the journal has it before its bytes go"


def test_many_versions_go_in_few_transactions_each_with_its_word_in_the_journal(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    for number in range(20):
        parent = f"team/bert@v{number}" if number else None
        push(registry, store, b"%d" % number, parent=parent)
    push(registry, store, b"last")
    registry.set_retention(BERT, Retention(keep_last=1))
    writes: list[object] = []
    event.listen(database.engine, "commit", writes.append)
    removed = list(retention.apply(database, "alice"))
    assert [due.ref for due in removed] == [f"team/bert@v{number}" for number in range(20, 0, -1)]
    assert len(writes) <= 3
    assert numbers(registry) == [21]
    journal = schema.outbox
    told = database.read(
        lambda tx: tx.scalars(select(journal.c.content).order_by(journal.c.id)).all()
    )
    gone = [entry["subject"] for entry in map(json.loads, told) if entry.get("what") == "removed"]
    assert gone == [due.ref for due in removed], "a child before its parent"


def test_a_version_that_is_held_keeps_its_parents(registry: Registry, store: LocalStore) -> None:
    push(registry, store, b"1")
    push(registry, store, b"2", parent="team/bert@v1")
    push(registry, store, b"3", parent="team/bert@v2")
    push(registry, store, b"4")
    registry.take_lease(Ref.parse("team/bert@v3"), "serving", 60)
    registry.set_retention(BERT, Retention(keep_last=1))
    assert gc(registry, store).versions_removed == 0
    assert numbers(registry) == [4, 3, 2, 1]


def test_uses_in_the_same_minute_are_one_write(
    registry: Registry, store: LocalStore, database: Database
) -> None:
    ref = Ref.parse(push(registry, store, noise(1)).ref)
    registry.mark_used(ref)
    first = registry.resolve(ref).last_used
    registry.mark_used(ref)
    assert registry.resolve(ref).last_used == first
    pass_time(database, 61)
    before = registry.resolve(ref).last_used
    registry.mark_used(ref)
    after = registry.resolve(ref).last_used
    assert before is not None
    assert after is not None
    assert after > before


@pytest.mark.parametrize("rules", [{"keep_last": 1_000_001}, {"ttl_s": 10**10 + 1}])
def test_a_rule_over_its_bound_is_refused(rules: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        Retention.model_validate(rules)


@pytest.mark.parametrize("rules", [{"keep_last": 10**30}, {"ttl_s": 10**17}, {"keep_last": "x"}])
def test_rules_that_are_not_understood_stop_gc_for_nobody_else(
    registry: Registry, store: LocalStore, database: Database, rules: dict[str, object]
) -> None:
    other = ModelName("team", "other")
    for data in (b"1", b"2"):
        push(registry, store, data)
        push(registry, store, data, model=other)
    registry.set_retention(other, Retention(keep_last=1))
    m = schema.models
    bad = update(m).where(m.c.name == BERT.name).values(retention=rules)
    database.write(lambda tx: tx.execute(bad))
    planned = registry.gc(store, GcOptions(), dry_run=True)
    report = gc(registry, store)
    for told in (planned, report):
        assert told.versions_removed == 1
        (said,) = told.failed
        assert said.startswith("team/bert: ")
    assert (numbers(registry), numbers(registry, other)) == ([2, 1], [2])
    assert registry.model(BERT).retention is None
