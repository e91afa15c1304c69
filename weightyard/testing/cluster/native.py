"""libhadoop, with which daemons use UNIX sockets: Hadoop's own jars do not carry it."""

from __future__ import annotations

import os
import platform
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

from weightyard.errors import ClusterFailed
from weightyard.testing.cluster.jars import class_path, native_home

_MACHINES = {"x86_64": "Linux-amd64", "aarch64": "Linux-aarch64", "ppc64le": "Linux-ppc64le"}
_LIBRARY = "libhadoop.so"


def library_folder(cache: Path, say: Callable[[str], None] = lambda _: None) -> Path:
    """The folder that `java.library.path` names; fetched if it is not in the cache yet.

    Raises ClusterFailed where there is none for this kind of machine.
    """
    kind = f"{platform.system()}/{platform.machine()}"
    part = _MACHINES.get(platform.machine()) if platform.system() == "Linux" else None
    if part is None:
        raise ClusterFailed(f"there is no {_LIBRARY} for {kind}: use a cluster without it")
    home = native_home(cache, say)
    folder = home / part
    if not (folder / _LIBRARY).is_file():
        folder.mkdir(exist_ok=True)
        for jar in class_path(home):
            with zipfile.ZipFile(jar) as opened:
                name = f"nativelib/{part}/{_LIBRARY}"
                if name not in opened.namelist():
                    continue
                partial = folder / f"{_LIBRARY}.{os.getpid()}"
                with opened.open(name) as source, partial.open("wb") as target:
                    shutil.copyfileobj(source, target)
                partial.rename(folder / _LIBRARY)
    if not (folder / _LIBRARY).is_file():
        raise ClusterFailed(f"what was fetched to {home} has no {_LIBRARY} for {kind}")
    return folder
