"""Gathering: what is to be pushed, found and split, before a byte of it is stored."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from weightyard.closing import Closing
from weightyard.errors import NoSuchThing
from weightyard.names import FilePath
from weightyard.settings import Settings
from weightyard.transfer.folder import folder_contents, split_sources
from weightyard.transfer.known import KnownFiles
from weightyard.transfer.options import texts_of
from weightyard.transfer.source import Source
from weightyard.transfer.strict_json import strict_json, why_not_kept
from weightyard.transfer.together import run_together
from weightyard.transfer.writer import Content

if TYPE_CHECKING:
    from weightyard.storage.hdfs.tree import HdfsTree, TreeFile

Patterns: TypeAlias = str | Collection[str]
"""What the paths of files must fit: one pattern, or any of several."""

MAX_CONFIG_BYTES = 1 << 20
"""The longest config.json that is looked into."""

_LOOKED_AT_ONCE = 8
"""Files of HDFS that the NameNode is asked about at the same time."""


class Choice:
    """Which files are wanted: those that fit a pattern, if there are any, and no excluding one."""

    def __init__(self, include: Patterns | None = None, exclude: Patterns | None = None) -> None:
        """Raises BadSetting."""
        self._include = texts_of("include", include) or []
        self._exclude = texts_of("exclude", exclude) or []

    @property
    def is_all(self) -> bool:
        """Whether all files are wanted."""
        return not self._include and not self._exclude

    def takes(self, path: FilePath) -> bool:
        """Whether a file of this path is wanted."""

        def fits(patterns: list[str]) -> bool:
            return any(fnmatch.fnmatchcase(path.text, pattern) for pattern in patterns)

        return (not self._include or fits(self._include)) and not fits(self._exclude)


EVERYTHING = Choice()


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
    rehash: bool = False,
) -> Gathered:
    """The files of a folder, here or in HDFS, or one file.

    For folders of this host: `follow_links` counts links to files as those files; `rehash` also
    reads files that have not changed since this user pushed them. Raises NoSuchThing, NotAllowed,
    BadSetting; Conflict if a file of HDFS is still being written.
    """
    choice = Choice(include, exclude)
    settings = settings or Settings()
    if not str(source).lower().startswith(("hdfs://", "viewfs://")):
        known = KnownFiles(settings.cache, rehash=rehash)
        contents = folder_contents(
            Path(source), block_bytes, choice.takes, follow_links=follow_links, opened=known.open
        )
        return Gathered(contents, known.close)
    from weightyard.storage.hdfs.tree import HdfsTree

    tree = HdfsTree(str(source), settings)
    try:
        files = [file for file in tree.files() if choice.takes(file.path)]
        if not files:
            raise NoSuchThing(f"{source} has no file that fits")
        looks = [partial(tree.require_closed, file) for file in files]
        run_together(_LOOKED_AT_ONCE, "weightyard-look", looks)
        contents = split_sources(
            ((file.path, TreeSource(tree, file)) for file in files), block_bytes
        )
    except BaseException:
        tree.close()
        raise
    return Gathered(contents, tree.close)


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
