"""Runs of files become one run of memory, without a copy and without a way back."""

from __future__ import annotations

import mmap
import random
from pathlib import Path

import pytest

from weightyard.storage.stitched import FileRun, can_stitch, have_at_hand, stitched

PAGE = mmap.PAGESIZE


def written(folder: Path, name: str, length: int) -> tuple[Path, bytes]:
    data = random.Random(name).randbytes(length)
    (folder / name).write_bytes(data)
    return folder / name, data


def test_runs_of_several_files_lie_behind_each_other(tmp_path: Path) -> None:
    (a, in_a), (b, in_b), (c, in_c) = (written(tmp_path, name, 5 * PAGE) for name in "abc")
    runs = [
        FileRun(a, PAGE + 32, 2 * PAGE),
        FileRun(b, 32, 3 * PAGE - 16),
        FileRun(c, 4 * PAGE + 16, 8),  # ends in the page in which it begins
        FileRun(a, 24, 2 * PAGE),
    ]
    expected = (
        in_a[PAGE + 32 :][: 2 * PAGE]
        + in_b[32:][: 3 * PAGE - 16]
        + in_c[4 * PAGE + 16 :][:8]
        + in_a[24:][: 2 * PAGE]
    )
    assert can_stitch(runs)
    assert bytes(stitched(runs)) == expected


def test_runs_that_do_not_meet_within_a_page_cannot_be_stitched(tmp_path: Path) -> None:
    assert can_stitch([FileRun(tmp_path, 16, PAGE), FileRun(tmp_path, 16, 1)])
    assert not can_stitch([FileRun(tmp_path, 16, PAGE), FileRun(tmp_path, 32, 1)])


def test_what_is_written_there_reaches_no_file(tmp_path: Path) -> None:
    (a, in_a), (b, in_b) = (written(tmp_path, name, 2 * PAGE) for name in "ab")
    runs = [FileRun(a, 16, PAGE), FileRun(b, 16, PAGE)]
    memory = stitched(runs)
    memory[:] = bytes(len(memory))
    assert (a.read_bytes(), b.read_bytes()) == (in_a, in_b)
    assert bytes(stitched(runs)) == in_a[16:][:PAGE] + in_b[16:][:PAGE]


def test_it_outlives_the_names_of_its_files(tmp_path: Path) -> None:
    file, data = written(tmp_path, "a", 3 * PAGE)
    memory = stitched([FileRun(file, 16, 2 * PAGE)])
    file.unlink()
    assert bytes(memory) == data[16:][: 2 * PAGE]


def test_a_file_that_ends_before_its_run_is_refused_before_it_is_touched(tmp_path: Path) -> None:
    file, _ = written(tmp_path, "a", 2 * PAGE)
    with pytest.raises(OSError, match="shorter"):
        stitched([FileRun(file, 16, 2 * PAGE)])
    with pytest.raises(FileNotFoundError):
        stitched([FileRun(tmp_path / "none", 0, PAGE)])


def test_memory_whose_file_cannot_be_read_any_more_is_an_error_and_kills_nobody(
    tmp_path: Path,
) -> None:
    file, data = written(tmp_path, "a", 4 * PAGE)
    memory = stitched([FileRun(file, 16, 3 * PAGE)])
    have_at_hand(memory)
    with file.open("r+b") as opened:
        opened.truncate(PAGE)
    have_at_hand(memory[: PAGE // 2])
    assert bytes(memory[: PAGE // 2]) == data[16:][: PAGE // 2]
    with pytest.raises(OSError, match="mapped memory"):
        have_at_hand(memory)
