"""Snapshots: a version's real files on this node, made once and mapped by everyone after."""

from __future__ import annotations

import os
import re
import resource
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from snapshot_world import BERT, content, damage, leftovers, push, settings_in, write_model, yard_in

from weightyard.errors import (
    NoSuchThing,
    NotAllowed,
    Protected,
    StoreFull,
)
from weightyard.loader.locks import Lock
from weightyard.loader.snapshot import Place
from weightyard.loader.snapshots import Snapshots, open_snapshot
from weightyard.names import Digest, Ref
from weightyard.opening import open_yard
from weightyard.registry.collect import GcOptions
from weightyard.testing.cluster import MiniCluster
from weightyard.yard import Yard


def test_a_snapshot_has_the_versions_files_bit_for_bit_and_nothing_else(
    yard: Yard, model: Path, tmp_path: Path
) -> None:
    digest = push(yard, model)
    path = yard.snapshot(f"{BERT}@prod")
    assert path == tmp_path / "cache" / "snapshots" / digest.hex
    assert content(path) == content(model)
    assert leftovers(tmp_path / "cache") == []


def test_a_second_snapshot_reads_nothing_from_the_store(yard: Yard, model: Path) -> None:
    push(yard, model)
    path = yard.snapshot(BERT)
    for pack in Path(yard.store.url.removeprefix("file://")).glob("packs/*/*"):
        pack.unlink()
    assert yard.snapshot(BERT) == path


def test_a_snapshot_is_private_to_its_user_and_its_files_are_not_writable(
    yard: Yard, model: Path
) -> None:
    push(yard, model)
    path = yard.snapshot(BERT)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((path / "config.json").stat().st_mode) == 0o400


def test_only_the_files_that_fit_are_in_a_snapshot_of_some(yard: Yard, model: Path) -> None:
    push(yard, model)
    some = yard.snapshot(BERT, include=["*.json", "shards/*"], exclude=["*-1.safetensors"])
    assert set(content(some)) == {"config.json", "shards/model-0.safetensors"}
    whole = yard.snapshot(BERT)
    assert content(whole) == content(model)
    assert set(content(some)) == {"config.json", "shards/model-0.safetensors"}, "left as it was"
    assert yard.snapshot(BERT, exclude=["*.nothing"]) == whole, "everything, by another name"
    with pytest.raises(NoSuchThing, match=r"config\.json"):
        yard.snapshot(BERT, include=["*.bin"])


def test_a_new_version_costs_only_the_shard_that_changed(
    yard: Yard, model: Path, tmp_path: Path
) -> None:
    push(yard, model)
    first = yard.snapshot(BERT)
    used_bytes = yard.snapshots.used_bytes()
    push(yard, write_model(tmp_path / "tuned", 1, 3))
    second = yard.snapshot(BERT)
    assert content(second) == content(tmp_path / "tuned")
    same, changed = "shards/model-0.safetensors", "shards/model-1.safetensors"
    assert (first / same).samefile(second / same)
    assert not (first / changed).samefile(second / changed)
    grown_bytes = yard.snapshots.used_bytes() - used_bytes
    assert grown_bytes < 1.2 * (second / changed).stat().st_size


def test_a_shared_file_that_was_damaged_is_fetched_not_linked(
    yard: Yard, model: Path, tmp_path: Path
) -> None:
    push(yard, model)
    damage(yard.snapshot(BERT) / "shards" / "model-0.safetensors")
    push(yard, write_model(tmp_path / "tuned", 1, 3))
    assert content(yard.snapshot(BERT)) == content(tmp_path / "tuned")


def test_what_is_done_to_a_mapped_tensor_never_reaches_the_file(yard: Yard, model: Path) -> None:
    pytest.importorskip("torch")
    push(yard, model)
    path = yard.snapshot(BERT)
    tensors = open_snapshot(path)
    for tensor in tensors.values():
        tensor.zero_()
    assert content(path) == content(model)
    assert open_snapshot(path)["layer0.weight"].abs().sum() > 0, "nor another mapping"


def test_a_mapped_snapshot_outlives_its_removal(yard: Yard, model: Path) -> None:
    torch = pytest.importorskip("torch")
    digest = push(yard, model)
    path = yard.snapshot(BERT)
    expected = {name: tensor.clone() for name, tensor in open_snapshot(path).items()}
    mapped = open_snapshot(path)
    yard.snapshots.remove(Place.of(yard.snapshots.root, digest))
    assert not path.exists()
    assert all(torch.equal(mapped[name], expected[name]) for name in expected)
    assert content(yard.snapshot(BERT)) == content(model), "and it can be made again meanwhile"


def test_a_folder_removed_by_hand_while_in_use_is_made_again(yard: Yard, model: Path) -> None:
    push(yard, model)
    path = yard.snapshot(BERT)
    path.rename(path.with_name("elsewhere"))
    assert content(yard.snapshot(BERT)) == content(model)


def test_the_least_recently_used_goes_first_and_what_is_in_use_stays(tmp_path: Path) -> None:
    size = 3 * 4 * 50_000
    paths = {}
    with yard_in(tmp_path) as yard:
        for number in (1, 2, 3, 4):
            name = f"team/m{number}"
            yard.push(write_model(tmp_path / str(number), 10 * number, 10 * number + 1), name)
    for number in (1, 2, 3):
        with yard_in(tmp_path) as yard:
            paths[number] = yard.snapshot(f"team/m{number}")
        lock = Place(paths[number].parent, paths[number].name).lock
        os.utime(lock, (time.time() - 1000 + number, time.time() - 1000 + number))
    with yard_in(tmp_path) as holder:
        os_time = time.time() - 2000
        held = holder.snapshots.find(Digest(paths[1].name))
        assert held is not None
        os.utime(Place(paths[1].parent, paths[1].name).lock, (os_time, os_time))
        with yard_in(tmp_path, cache_max=int(2.5 * size)) as yard:
            paths[4] = yard.snapshot("team/m4")
            kept = {number for number, path in paths.items() if path.exists()}
            assert kept == {1, 3, 4}, "1 is in use, 2 was used least recently"
        held.close()


def test_a_snapshot_over_the_bound_is_refused_and_evicts_nothing(
    model: Path, tmp_path: Path
) -> None:
    small = write_model(tmp_path / "small", 9, elements=100)
    with yard_in(tmp_path) as yard:
        yard.push(small, "team/small")
        kept = yard.snapshot("team/small")
    with yard_in(tmp_path, cache_max=100_000) as yard:
        push(yard, model)
        with pytest.raises(
            StoreFull, match=r"97\.7 KiB may be used \(WEIGHTYARD_CACHE_MAX\)"
        ) as why:
            yard.snapshot(BERT)
        assert re.match(r"\d+\.\d [KM]iB more do not fit below", str(why.value))
        assert kept.exists()
    assert leftovers(tmp_path / "cache") == []


def test_a_full_disk_is_said_and_leaves_nothing(yard: Yard, model: Path, tmp_path: Path) -> None:
    push(yard, model)
    assert yard._settling.wait(), "its records are written: nothing else meets the full disk"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(StoreFull, match="too large"):
            yard.snapshot(BERT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert leftovers(tmp_path / "cache") == []
    assert yard.snapshots.listed() == []
    assert content(yard.snapshot(BERT)) == content(model)


def test_what_is_made_while_leftovers_are_swept_stays(
    yard: Yard, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = push(yard, model)
    place = Place.of(yard.snapshots.root, digest)
    yard.snapshot(BERT)
    yard.snapshots.remove(place)
    place.lock.touch()  # as of one who was killed before it was made
    take = Lock.take

    def later(file: Path, **how: Any) -> Lock | None:
        monkeypatch.undo()
        with yard_in(tmp_path) as other:
            other.snapshot(BERT)
        return take(file, **how)

    monkeypatch.setattr(Lock, "take", later)
    yard.snapshots.sweep()
    assert content(place.folder) == content(model)
    assert yard.snapshots.find(digest) is not None


@pytest.mark.parametrize("what", ["truncated", "link", "gone"])
def test_a_file_that_is_not_as_it_was_made_is_noticed_before_it_is_mapped(
    yard: Yard, model: Path, tmp_path: Path, what: str
) -> None:
    digest = push(yard, model)
    path = yard.snapshot(BERT)
    file = path / "config.json"
    if what == "truncated":
        file.chmod(0o600)
        os.truncate(file, 3)
    else:
        file.unlink()
    if what == "link":
        (tmp_path / "evil").write_bytes((model / "config.json").read_bytes())
        file.symlink_to(tmp_path / "evil")
    assert yard.snapshots.find(digest) is None
    assert content(yard.snapshot(BERT)) == content(model)


def test_a_cache_that_is_a_link_or_of_someone_else_is_refused(
    yard: Yard, model: Path, tmp_path: Path
) -> None:
    digest = push(yard, model)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cache").mkdir(exist_ok=True)
    root = tmp_path / "cache" / "snapshots"
    root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotAllowed, match="WEIGHTYARD_CACHE"):
        yard.snapshot(BERT)
    root.unlink()
    if os.geteuid() == 0:
        root.mkdir()
        os.chown(root, 12345, 12345)
        with pytest.raises(NotAllowed, match="12345"):
            yard.snapshot(BERT)
        root.rmdir()
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(NotAllowed, match="every user"):
        yard.snapshot(BERT)
    (tmp_path / "cache").chmod(0o700)
    assert Place.of(root, digest).folder == yard.snapshot(BERT)


def test_a_cache_that_is_a_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(NoSuchThing, match="Not a directory"):
        Snapshots(tmp_path / "cache").listed()
    with yard_in(tmp_path) as yard:
        push(yard, write_model(tmp_path / "model", 1))
        with pytest.raises(NoSuchThing, match="Not a directory"):
            yard.snapshot(BERT)


def test_a_hostile_record_is_no_snapshot(yard: Yard, model: Path, tmp_path: Path) -> None:
    digest = push(yard, model)
    path = yard.snapshot(BERT)
    place = Place(path.parent, path.name)
    good = place.record_file.read_bytes()
    for bad in (b"", b"{", good.replace(b"config.json", b"../../../x"), b"[" * 100_000):
        place.record_file.write_bytes(bad)
        assert place.read_record() is None
        assert yard.snapshots.find(digest) is None
    place.record_file.unlink()
    place.record_file.symlink_to(tmp_path / "model" / "config.json")
    assert yard.snapshots.find(digest) is None
    place.record_file.unlink()
    assert content(yard.snapshot(BERT)) == content(model)


def test_while_it_is_made_the_versions_bytes_are_held(yard: Yard, model: Path) -> None:
    push(yard, model)
    seen: list[str] = []

    def look(done_bytes: int) -> None:
        yard.catalogue.remove(Ref.parse(BERT)) if not seen else None
        report = yard.registry.gc(yard.store, _no_grace())
        seen.append(str(report.packs_deleted))

    yard.set_alias(BERT, "prod", None)
    path = yard.snapshot(BERT, progress=look)
    assert seen
    assert set(seen) == {"0"}
    assert content(path) == content(model)
    gone = [yard.registry.gc(yard.store, _no_grace()).packs_deleted for _ in range(2)]
    assert sum(gone), "held no longer than needed"


def _no_grace() -> GcOptions:
    return GcOptions(grace_s=0.0, unsafe_grace=True, embedded=True, min_replicas=1)


def test_a_maker_that_hangs_is_named_and_not_waited_for_forever(
    yard: Yard, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightyard.errors import DeadlineExceeded
    from weightyard.loader import snapshots as module

    digest = push(yard, model)
    yard.snapshot(BERT)
    place = Place.of(yard.snapshots.root, digest)
    yard.snapshots.remove(place)
    monkeypatch.setattr(module, "PATIENCE_S", 0.5)
    with Lock.wait(place.lock, 1) as held:
        held.write("process 4711")
        with pytest.raises(DeadlineExceeded, match="process 4711"):
            yard.snapshot(BERT)
        path = place.folder
        path.mkdir()
        with pytest.raises(Protected, match="process 4711"):
            yard.snapshots.remove(place)
    assert content(yard.snapshot(BERT)) == content(model)


BUILDER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from snapshot_world import yard_in
with yard_in(Path({folder!r})) as yard:
    print("ready", flush=True)
    sys.stdin.readline()
    made = []
    path = yard.snapshot("team/bert", progress=lambda done: (made.append(done), time.sleep(0.2)))
    print(len(made), path, flush=True)
"""


def test_processes_that_want_the_same_at_once_make_it_once(
    yard: Yard, model: Path, tmp_path: Path
) -> None:
    push(yard, model)
    script = BUILDER.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate(timeout=60)[0].split() for process in running]
    assert sorted(int(made) > 0 for made, _ in said) == [False, False, True]
    (path,) = {Path(path) for _, path in said}
    assert content(path) == content(model)


def test_a_pull_does_not_need_the_cache_and_does_not_change_it(
    yard: Yard, model: Path, tmp_path: Path
) -> None:
    push(yard, model)
    path = yard.snapshot(BERT)
    yard.pull(BERT, tmp_path / "out")
    assert content(tmp_path / "out") == content(path)
    assert yard.snapshot(BERT) == path


def test_the_bound_may_be_written_as_people_write_it() -> None:
    assert settings_in(Path("/x"), cache_max="200G").cache_max == 200 << 30
    assert settings_in(Path("/x"), cache_max="1.5TiB").cache_max == int(1.5 * (1 << 40))
    assert settings_in(Path("/x"), cache_max="1000").cache_max == 1000
    from weightyard.errors import BadSetting

    for bad in ("much", "-1", "1e9", "5X"):
        with pytest.raises(BadSetting, match="CACHE_MAX"):
            settings_in(Path("/x"), cache_max=bad)


def test_without_a_bound_half_of_what_would_be_free_may_be_used(tmp_path: Path) -> None:
    tmp_path.joinpath("snapshots").mkdir()
    snapshots = Snapshots(tmp_path)
    import shutil

    free = shutil.disk_usage(tmp_path).free
    assert snapshots.limit_bytes(1 << 30) == pytest.approx((free + (1 << 30)) / 2, rel=0.05)


@pytest.mark.cluster
def test_a_snapshot_of_a_model_in_hdfs_needs_no_hdfs_afterwards(
    cluster: MiniCluster, model: Path, tmp_path: Path
) -> None:
    url = f"{cluster.fresh_dir()}/yard"
    settings = settings_in(tmp_path, hadoop_conf_dir=cluster.conf_dir)
    with open_yard(url, settings=settings) as yard:
        yard.push(model, BERT, alias="prod")
        path = yard.snapshot(f"{BERT}@prod")
        assert content(path) == content(model)
    with open_yard(url, settings=settings_in(tmp_path, offline=True)) as yard:
        assert yard.snapshot(f"{BERT}@prod") == path
