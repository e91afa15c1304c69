"""Gathering: what is to be pushed, found and split, before a byte of it is stored."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from weightyard.closing import Closing
from weightyard.errors import NoSuchThing
from weightyard.names import FilePath
from weightyard.settings import Settings
from weightyard.transfer.folder import folder_contents, split_sources
from weightyard.transfer.source import Source
from weightyard.transfer.strict_json import strict_json, why_not_kept
from weightyard.transfer.writer import Content

if TYPE_CHECKING:
    from weightyard.storage.hdfs.tree import HdfsTree, TreeFile

Patterns: TypeAlias = str | Sequence[str]
"""What paths of files fit: one pattern, or several."""

MAX_CONFIG_BYTES = 1 << 20
"""Of a config.json that is looked into."""


@dataclass(frozen=True, slots=True)
class Gathered(Closing):
    """Contents to push. A context manager: their sources are given up when it is left."""

    contents: Sequence[Content]
    close: Callable[[], None] = lambda: None

    @property
    def logical_bytes(self) -> int:
        return sum(piece.raw_bytes for content in self.contents for piece in content.split.pieces)

    @property
    def config(self) -> dict[str, Any] | None:
        """The model's config.json, if it has one that is a JSON object of a sensible size."""
        for content in self.contents:
            if [file.path for file in content.split.files] == ["config.json"]:
                source = content.sources[0]
                if source.length > MAX_CONFIG_BYTES:
                    return None
                return parsed_config(source.read_at(0, source.length))
        return None


def gather_files(
    source: str | Path,
    block_bytes: int,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    settings: Settings | None = None,
    *,
    follow_links: bool = False,
) -> Gathered:
    """The files of a folder, here or in HDFS, or one file. Raises NoSuchThing, NotAllowed.

    `follow_links` is for folders of this host: links to files count as these.
    """

    def wanted(path: FilePath) -> bool:
        return is_wanted(path.text, include, exclude)

    if not str(source).lower().startswith(("hdfs://", "viewfs://")):
        contents = folder_contents(Path(source), block_bytes, wanted, follow_links=follow_links)
        return Gathered(contents)
    from weightyard.storage.hdfs.tree import HdfsTree

    tree = HdfsTree(str(source), settings)
    try:
        files = [file for file in tree.files() if wanted(file.path)]
        if not files:
            raise NoSuchThing(f"{source} has no file that fits")
        contents = split_sources(
            ((file.path, TreeSource(tree, file)) for file in files), block_bytes
        )
    except BaseException:
        tree.close()
        raise
    return Gathered(contents, tree.close)


def is_wanted(path: str, include: Patterns | None, exclude: Patterns | None) -> bool:
    """Whether a path fits one of the patterns, or there are none, and fits no excluding one."""

    def fits(patterns: Patterns) -> bool:
        several = [patterns] if isinstance(patterns, str) else patterns
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in several)

    return (not include or fits(include)) and not (exclude and fits(exclude))


class TreeSource(Source):
    """A file in HDFS, streamed: only what is being stored is in memory, and none on disk."""

    def __init__(self, tree: HdfsTree, file: TreeFile) -> None:
        self._tree = tree
        self._file = file
        self.length = file.length

    def read_into(self, offset: int, into: memoryview) -> None:
        self._tree.read_into(self._file, offset, into)


def parsed_config(text: bytes) -> dict[str, Any] | None:
    """What a config.json says, if it is a JSON object; it is anyone's, and may be anything."""
    try:
        config = strict_json(text)
    except ValueError:
        return None
    return config if isinstance(config, dict) and why_not_kept(config) is None else None
