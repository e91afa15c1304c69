"""`Yard` as people write it down: its signatures, and what they promise."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from service_world import World, make_world, served

import weightyard
from weightyard import Yard
from weightyard.errors import AliasMoved, BadSetting, InvalidName, NoSuchThing, Refused
from weightyard.loader.snapshots import open_snapshot
from weightyard.names import FilePath
from weightyard.opening import open_yard
from weightyard.settings import Settings

BERT = "team/bert"
LIMIT_S = 60.0


class Promised:
    """What callers may rely on. A yard may take more, by keyword."""

    # fmt: off
    def push(self, source, name, *, alias=None, parent=None, message="", metrics=None, tags=None,
             metadata=None, include=None, exclude=None, replication=None, policy=None,
             codec="auto", delta="off", progress=None): ...
    def pull(self, ref, dir, *, include=None, exclude=None): ...
    def load(self, ref, device="cpu", *, files=None, tensors=None, slices=None, dtype=None,
             group=None, cache=True, verify="fast", timeout=None, progress=None): ...
    def load_into(self, module, ref, *, strict=True): ...
    def stream(self, ref): ...
    def safe_open(self, ref, device="cpu"): ...
    def snapshot(self, ref, *, include=None, exclude=None): ...
    def follow(self, ref): ...
    def resolve(self, ref): ...
    def models(self): ...
    def versions(self, name): ...
    def diff(self, a, b): ...
    def delete(self, ref): ...
    def annotate(self, ref, *, message=None, metrics=None, tags=None, metadata=None): ...
    def set_alias(self, name, alias, to, *, reason="", expect=None): ...
    def alias_log(self, name, alias): ...
    def rollback_alias(self, name, alias): ...
    # fmt: on


METHODS = [name for name in vars(Promised) if not name.startswith("_")]


@pytest.mark.parametrize("name", METHODS)
def test_the_signatures_people_rely_on_stay_what_they_are(name: str) -> None:
    promised = inspect.signature(getattr(Promised, name)).parameters
    found = inspect.signature(getattr(Yard, name)).parameters
    by_place = [one.name for one in promised.values() if one.kind is not one.KEYWORD_ONLY]
    assert list(found)[: len(by_place)] == by_place
    for one in promised.values():
        assert (found[one.name].kind, found[one.name].default) == (one.kind, one.default), one.name
    more = [one for one in found.values() if one.name not in promised]
    assert all(one.default is not one.empty for one in more)


def test_the_functions_of_the_package_take_what_the_yards_do() -> None:
    for name in ("push", "pull", "load"):
        ours = inspect.signature(getattr(weightyard, name)).parameters.values()
        yards = list(inspect.signature(getattr(Yard, name)).parameters.values())[1:]
        by_place = [
            (one.name, one.default) for one in ours if one.kind is one.POSITIONAL_OR_KEYWORD
        ]
        assert by_place == [(one.name, one.default) for one in yards[: len(by_place)]]
        assert [one for one in ours if one.kind is one.VAR_KEYWORD], "and every option"
    opened = inspect.signature(weightyard.open).parameters
    assert (next(iter(opened)), opened["url"].default, opened["token"].default) == (
        "url",
        None,
        None,
    )


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with make_world(tmp_path / "service") as made:
        yield made


@pytest.fixture(params=["embedded", "service"])
def yard(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Yard]:
    """One yard, had directly and through its service."""
    settings = Settings(home=tmp_path / "home", cache=tmp_path / "cache", url=None, store=None)
    if request.param == "embedded":
        with open_yard(str(tmp_path / "store"), settings=settings) as opened:
            yield opened
        return
    world: World = request.getfixturevalue("world")
    with (
        served(world.app) as url,
        open_yard(url, token=world.secrets["writer"], settings=settings) as opened,
    ):
        yield opened


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "w.bin").write_bytes(b"weights" * 1000)
    return folder


def test_an_alias_is_expected_somewhere_nowhere_or_anywhere(yard: Yard, model: Path) -> None:
    for _ in range(2):
        yard.push(model, BERT)
    yard.set_alias(BERT, "prod", 1, expect=0)
    with pytest.raises(AliasMoved):
        yard.set_alias(BERT, "prod", 2, expect=0)
    with pytest.raises(AliasMoved):
        yard.set_alias(BERT, "prod", 1, expect=2)
    yard.set_alias(BERT, "prod", 2, expect=1)
    yard.set_alias(BERT, "prod", 1, expect=None)
    assert yard.resolve(f"{BERT}@prod").number == 1


def test_what_is_said_of_a_version_is_changed_later_key_by_key(yard: Yard, model: Path) -> None:
    said = {"data": {"name": "squad", "rows": 87599}, "seed": 7}
    pushed = yard.push(
        model, BERT, message="first", metrics={"loss": 0.3}, tags={"task": "qa"}, metadata=said
    )
    assert yard.resolve(BERT).metadata == said
    changed = yard.annotate(
        BERT, message="better said", metrics={"f1": 0.9}, tags={"task": None, "by": "alice"},
        metadata={"seed": None},
    )  # fmt: skip
    assert changed == yard.resolve(BERT)
    assert (changed.digest, changed.message) == (pushed.digest, "better said")
    assert changed.metrics == {"loss": 0.3, "f1": 0.9}
    assert changed.tags == {"by": "alice"}
    assert changed.metadata == {"data": said["data"]}
    assert yard.annotate(BERT, message="").message == ""
    with pytest.raises(Refused):
        yard.annotate(BERT, metrics={"loss": float("nan")})
    with pytest.raises(NoSuchThing):
        yard.annotate("team/none", message="x")


@pytest.mark.parametrize(
    "number",
    [1 << 64, -(1 << 63) - 1, 10**400, 10**5000],
    ids=["65 bits", "negative", "400 digits", "5000 digits"],
)
def test_a_number_that_not_every_program_reads_back_is_refused(
    yard: Yard, model: Path, number: int
) -> None:
    with pytest.raises(Refused, match="64 bits"):
        yard.push(model, BERT, metadata={"seeds": [number]})
    yard.push(model, BERT, metadata={"seeds": [(1 << 64) - 1, -(1 << 63)]})
    with pytest.raises(Refused, match="64 bits"):
        yard.annotate(BERT, metadata={"seeds": number})


def together(*calls: Callable[[], Any]) -> list[BaseException]:
    """Run calls at the same time; what they raised."""
    failed: list[BaseException] = []
    begin = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> None:
        begin.wait(LIMIT_S)
        try:
            call()
        except BaseException as why:  # noqa: BLE001  it is looked at by who asked
            failed.append(why)

    threads = [threading.Thread(target=run, args=[call]) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return failed


def test_who_annotates_at_the_same_time_loses_nothing(yard: Yard, model: Path) -> None:
    yard.push(model, BERT)
    failed = together(*(lambda n=n: yard.annotate(BERT, tags={f"by-{n}": "yes"}) for n in range(5)))
    assert failed == []
    assert yard.resolve(BERT).tags == {f"by-{n}": "yes" for n in range(5)}


def test_annotating_goes_on_where_a_newer_service_tags_more_than_is_seen_here(
    yard: Yard, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    yard.push(model, BERT)
    annotate = yard.catalogue.annotate

    def tagged_otherwise(ref: Any, changes: Any, *, expect: str | None = None) -> Any:
        return annotate(ref, changes, expect=None if expect is None else "0" * 32)

    monkeypatch.setattr(yard.catalogue, "annotate", tagged_otherwise)
    assert yard.annotate(BERT, tags={"a": "b"}).tags == {"a": "b"}


def test_a_file_whose_name_looks_like_another_is_named_and_nothing_is_published(
    yard: Yard, model: Path
) -> None:
    name = "m\u043edel.safetensors"
    (model / name).write_bytes(b"not what it seems")
    with pytest.raises(InvalidName, match="could be taken for another") as refused:
        yard.push(model, BERT)
    assert ascii(name)[1:-1] in str(refused.value)
    assert yard.models() == []
    assert yard.push(model, BERT, include=["w.bin"]).files == 1


def test_a_service_refuses_such_a_name_from_an_older_client_too(
    world: World, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AsBefore(FilePath):
        of_new = classmethod(lambda cls, text: FilePath(text))

    monkeypatch.setattr("weightyard.transfer.folder.FilePath", AsBefore)
    (model / "m\u043edel.safetensors").write_bytes(b"not what it seems")
    settings = Settings(home=tmp_path / "home", cache=tmp_path / "cache", url=None, store=None)
    secret = world.secrets["writer"]
    with served(world.app) as url, open_yard(url, token=secret, settings=settings) as yard:
        with pytest.raises(InvalidName, match="could be taken for another"):
            yard.push(model, BERT)
        assert yard.models() == []


def test_one_embedded_yard_serves_several_threads(tmp_path: Path, model: Path) -> None:
    settings = Settings(home=tmp_path / "home", cache=tmp_path / "cache", url=None, store=None)
    with open_yard(str(tmp_path / "store"), settings=settings) as yard:

        def work(n: int) -> None:
            source = tmp_path / f"source-{n}"
            source.mkdir()
            (source / "own.bin").write_bytes(b"%d" % n * 100_000)
            (source / "shared.bin").write_bytes(b"shared" * 50_000)
            for turn in (1, 2):
                assert yard.push(source, f"team/own-{n}", alias="prod").number == turn
                yard.push(source, BERT)
            yard.annotate(f"team/own-{n}@prod", tags={"thread": str(n)})
            out = yard.pull(f"team/own-{n}@prod", tmp_path / f"out-{n}")
            assert (out / "own.bin").read_bytes() == (source / "own.bin").read_bytes()
            assert yard.diff(f"team/own-{n}@v1", f"team/own-{n}@prod").files_same == 2

        assert together(*(lambda n=n: work(n) for n in range(4))) == []
        assert [version.number for version in yard.versions(BERT)] == list(range(8, 0, -1))
        assert len(yard.models()) == 5


def test_the_parent_is_the_version_its_alias_was_on_when_the_push_began(tmp_path: Path) -> None:
    with weightyard.open(str(tmp_path / "yard")) as yard:
        for content in (b"one", b"two"):
            (tmp_path / "weights.bin").write_bytes(content)
            yard.push(tmp_path / "weights.bin", "team/base", alias="prod")
        (tmp_path / "weights.bin").write_bytes(b"tuned")
        pushed = yard.push(
            tmp_path / "weights.bin",
            "team/tuned",
            parent="team/base@prod",
            progress=lambda done_bytes: yard.set_alias("team/base", "prod", 1) and None,
        )
        assert yard.resolve("team/base@prod").number == 1
        assert pushed.parent == "team/base@v2"


def test_a_delta_needs_a_parent(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"one")
    with weightyard.open(str(tmp_path / "yard")) as yard:
        with pytest.raises(Refused, match="needs a parent"):
            yard.push(tmp_path / "weights.bin", "team/base", delta="only")
        assert yard.models() == []


def test_a_yard_is_opened_by_the_path_of_its_folder(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTYARD_CACHE", str(tmp_path / "cache"))
    with weightyard.open(tmp_path / "yard") as yard:
        yard.push(model, "team/bert")
    with weightyard.open(str(tmp_path / "yard")) as yard:
        assert yard.resolve("team/bert").number == 1


def test_a_closed_yard_refuses_whatever_is_asked_of_it(yard: Yard, model: Path) -> None:
    yard.push(model, BERT)
    yard.close()
    asked: list[Callable[[], object]] = [
        lambda: yard.load(BERT),
        lambda: yard.stream(BERT),
        lambda: yard.safe_open(BERT),
        lambda: yard.snapshot(BERT),
        lambda: yard.follow(f"{BERT}@prod"),
        lambda: yard.push(model, BERT),
        lambda: yard.resolve(BERT),
        lambda: yard.models(),
        lambda: yard.store,
        lambda: yard.registry,
    ]
    for ask in asked:
        with pytest.raises(Refused, match=r"was closed: open it again"):
            ask()
    yard.close()


@pytest.mark.parametrize("nothing", ["", " "])
def test_no_name_is_not_taken_for_the_default_yard(nothing: str) -> None:
    with pytest.raises(BadSetting, match=r"empty; .* leave it out"):
        weightyard.open(nothing)


@pytest.mark.parametrize("path", ["a\0b", "a\ud800"])
def test_what_cannot_be_a_path_is_refused_as_such(tmp_path: Path, path: str) -> None:
    with open_yard(tmp_path / "yard", settings=Settings(cache=tmp_path / "cache")) as yard:
        yard.push({"w": torch.ones(3)}, BERT)
        uses: list[Callable[[], object]] = [
            lambda: yard.pull(BERT, path),
            lambda: yard.push(path, BERT),
            lambda: weightyard.open(path),
            lambda: open_snapshot(path),
        ]
        for use in uses:
            with pytest.raises(Refused, match="cannot be a"):
                use()
