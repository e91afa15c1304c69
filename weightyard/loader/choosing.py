"""Choosing: which files' tensors a load means, which of them, and in which order. Pure."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, TypeVar

import msgspec

from weightyard.errors import NoSuchThing, Refused
from weightyard.format.block import MIB
from weightyard.format.manifest import FileEntry, Manifest, TensorEntry

MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SUFFIX = ".safetensors"

MAX_INDEX_BYTES = 64 * MIB

_DIGITS = re.compile(r"(\d+)")
_FEW = 8

_T = TypeVar("_T")


class _IndexFile(msgspec.Struct):
    weight_map: dict[str, Annotated[str, msgspec.Meta(max_length=4096)]]


def index_needed(manifest: Manifest, files: Sequence[str] | None) -> FileEntry | None:
    """The file that says which shards are the model, where nothing else does."""
    if files is not None or any(tensor.file is None for tensor in manifest.tensors):
        return None
    by_path = {file.path: file for file in manifest.files}
    return None if MODEL in by_path else by_path.get(INDEX)


def read_index(content: bytes) -> Mapping[str, str]:
    """Tensor → file, as the index of a sharded model says. Raises Refused."""
    try:
        return msgspec.json.decode(content, type=_IndexFile).weight_map
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as why:
        raise Refused(f"{INDEX}: {str(why)[:200]}: name the files to load") from None


def choose(
    manifest: Manifest,
    files: Sequence[str] | None = None,
    tensors: Sequence[str] | None = None,
    index: Mapping[str, str] | None = None,
) -> list[TensorEntry]:
    """The tensors a load means, in model order: file by file, layer 2 before layer 10.

    `files` are paths or patterns. Without them: the state dict; else `model.safetensors`; else what
    the index of its shards names; else the only file that has tensors. `tensors` are names or
    patterns; one that begins with `!` leaves out what fits it, and the last that fits decides.
    What is the name of a tensor is not taken as a pattern, even if it has brackets.
    Raises NoSuchThing, Refused if two of the files have a tensor of the same name.
    """
    found = _of_index(manifest, index) if index is not None else _of_files(manifest, files)
    _refuse_doubles(manifest, found)
    if tensors is not None:
        chosen = set(fitting([tensor.name for tensor in found], tensors))
        found = [tensor for tensor in found if tensor.name in chosen]
    order = {path: at for at, path in enumerate(sorted({_path(manifest, one) for one in found}))}
    found.sort(key=lambda one: (order[_path(manifest, one)], _natural(one.name), one.name))
    return found


def fitting(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The names that patterns let in. Raises NoSuchThing for a pattern that fits nothing."""
    names = dict.fromkeys(names)
    for pattern in patterns:
        wanted = pattern.removeprefix("!")
        if not meant(names, wanted):
            raise NoSuchThing(f"no tensor fits {wanted!r}; there are {some_of(names, wanted)}")
    return admitted(names, patterns)


def admitted(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The names let in by the last pattern that fits; those none fits, if the first has a `!`."""
    is_in = dict.fromkeys(names, bool(patterns) and patterns[0].startswith("!"))
    for pattern in patterns:
        for name in meant(is_in, pattern.removeprefix("!")):
            is_in[name] = not pattern.startswith("!")
    return [name for name, is_wanted in is_in.items() if is_wanted]


def meant(names: Mapping[str, object], pattern: str) -> list[str]:
    """The names a pattern means: the one it is itself, or if it is none, all that it fits.

    `w[0]` is a common kind of name, but as a pattern it would fit `w0`.
    """
    if pattern in names:
        return [pattern]
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]


def by_name(names: Iterable[str], patterns: Mapping[str, _T]) -> dict[str, _T]:
    """What is said for each name: by the name itself, else by the first pattern that fits.

    Raises NoSuchThing for a pattern that fits nothing.
    """
    names = dict.fromkeys(names)
    found: dict[str, _T] = {}
    for pattern, value in patterns.items():
        if not (fits := meant(names, pattern)):
            near = some_of(names, pattern)
            raise NoSuchThing(f"no tensor to slice fits {pattern!r}; there are {near}")
        for name in fits:
            if name == pattern:
                found[name] = value
            else:
                found.setdefault(name, value)
    return found


def _of_files(manifest: Manifest, patterns: Sequence[str] | None) -> list[TensorEntry]:
    """The tensors of files, by their paths or by what is usual."""
    state = [tensor for tensor in manifest.tensors if tensor.file is None]
    if patterns is None and state:
        return state
    having = {tensor.file for tensor in manifest.tensors if tensor.file is not None}
    paths = {manifest.files[number].path: number for number in sorted(having)}
    if patterns is None:
        chosen = [MODEL] if MODEL in paths else _only(manifest, list(paths))
    else:
        fits = {pattern: meant(paths, pattern) for pattern in patterns}
        for pattern in patterns:
            if not fits[pattern]:
                raise NoSuchThing(f"no file with tensors fits {pattern!r}: {_inventory(manifest)}")
        chosen = [path for some in fits.values() for path in some]
    numbers = {paths[path] for path in chosen}
    return [tensor for tensor in manifest.tensors if tensor.file in numbers]


def _of_index(manifest: Manifest, index: Mapping[str, str]) -> list[TensorEntry]:
    there = {(_path(manifest, tensor), tensor.name): tensor for tensor in manifest.tensors}
    for name, path in index.items():
        if (path, name) not in there:
            raise NoSuchThing(
                f"{INDEX} says that tensor {name[:200]!r} is in {path[:200]!r}, where it is not: "
                f"name the files to load; {_inventory(manifest)}"
            )
    return [there[path, name] for name, path in index.items()]


def _refuse_doubles(manifest: Manifest, tensors: Iterable[TensorEntry]) -> None:
    seen: dict[str, TensorEntry] = {}
    for tensor in tensors:
        if (first := seen.setdefault(tensor.name, tensor)) is not tensor:
            raise Refused(
                f"tensor {tensor.name} is in {_path(manifest, first)} and in "
                f"{_path(manifest, tensor)}: load them one by one, with files="
            )


def _only(manifest: Manifest, having: Sequence[str]) -> Sequence[str]:
    """The only file that has tensors. Raises NoSuchThing unless it is sure to be the model."""
    if not having:
        raise NoSuchThing(f"there are no tensors in it: {_inventory(manifest)}")
    odd = [f.path for f in manifest.files if f.path.endswith(_SUFFIX) and f.path not in having]
    if odd:  # one of these may be the model, and the file with tensors only its adapter
        raise NoSuchThing(
            f"{some_of(odd)}: kept as plain bytes (a hole, a double name or an odd header), or "
            f"empty; say with files= which to load of {some_of(having)}, or push anew what "
            "safetensors writes"
        )
    if len(having) == 1:
        return having
    raise NoSuchThing(
        f"it has neither {MODEL} nor {INDEX}: say with files= which to load of {some_of(having)}"
    )


def _inventory(manifest: Manifest) -> str:
    having = {tensor.file for tensor in manifest.tensors}
    if having == {None}:
        return "its tensors are a state dict's, in no file: leave files= out"
    with_tensors = [f.path for number, f in enumerate(manifest.files) if number in having]
    if with_tensors:
        return f"tensors are in {some_of(with_tensors)}"
    # A file with an odd header is kept as plain bytes.
    return (
        f"its files are {some_of([f.path for f in manifest.files])}; `pull` gives them as they are"
    )


def _path(manifest: Manifest, tensor: TensorEntry) -> str:
    return "" if tensor.file is None else manifest.files[tensor.file].path


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """A key that orders numbers inside names as numbers."""
    parts = _DIGITS.split(name)
    return tuple(
        (len(part.lstrip("0")), part.lstrip("0")) if number % 2 else (0, part)
        for number, part in enumerate(parts)
    )


def some_of(names: Collection[str], like: str = "") -> str:
    """A few of many names, for a message: first those that look `like` a name there is not."""
    few = list(dict.fromkeys([*get_close_matches(like, names), *names]))[:_FEW]
    shown = ", ".join(few)
    if len(names) > len(few):
        return f"{shown} and {len(names) - len(few)} more"
    return shown or "none"
