"""Hadoop's jars, from Maven Central by pure Python, kept in the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from weightyard.errors import ClusterFailed

HADOOP_VERSION = "3.5.0"

COORDINATES = (
    f"org.apache.hadoop:hadoop-hdfs:{HADOOP_VERSION}",
    f"org.apache.hadoop:hadoop-common:{HADOOP_VERSION}",
    f"org.apache.hadoop:hadoop-hdfs-client:{HADOOP_VERSION}",
    # For StaticMapping: racks by host name. The usual mappings go by address, and on loopback
    # every DataNode has the same.
    f"org.apache.hadoop:hadoop-common:{HADOOP_VERSION}:tests",
    # Hadoop brings the logging library but not the link to it: without this, empty logs.
    "org.slf4j:slf4j-reload4j:1.7.36",
)

KDC_COORDINATES = (f"org.apache.hadoop:hadoop-minikdc:{HADOOP_VERSION}", COORDINATES[-1])

NATIVE_COORDINATES = ("com.facebook.presto.hadoop:hadoop-apache2:2.7.4-12",)
"""A jar that carries libhadoop for several kinds of machine; only that is used."""

_SCOPES = ("compile", "runtime")
"""Of what jars need, that which daemons run with."""

FETCH_TIMEOUT_S = 900
"""How long to wait for another process that is fetching."""


def hadoop_home(cache: Path, say: Callable[[str], None] = lambda _: None) -> Path:
    """The cache folder of this Hadoop version, its `jars` filled; fetched if not there yet.

    Any number of processes may ask at once: one fetches, the others wait for it.
    """
    return _fetched(cache, f"hadoop-{HADOOP_VERSION}", COORDINATES, say)


def kdc_home(cache: Path, say: Callable[[str], None] = lambda _: None) -> Path:
    """The same for the KDC that Hadoop's own tests use."""
    return _fetched(cache, f"kdc-{HADOOP_VERSION}", KDC_COORDINATES, say)


def native_home(cache: Path, say: Callable[[str], None] = lambda _: None) -> Path:
    """The same for the jar that libhadoop is in."""
    return _fetched(cache, "native-2.7.4", NATIVE_COORDINATES, say)


def class_path(home: Path) -> list[Path]:
    """The jars, in an order that is the same for every daemon."""
    return sorted((home / "jars").glob("*.jar"))


def _fetched(
    cache: Path, name: str, coordinates: Sequence[str], say: Callable[[str], None]
) -> Path:
    key = hashlib.blake2s("\n".join(coordinates).encode()).hexdigest()[:12]
    home = cache / f"{name}-{key}"
    if not home.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{home.name}.lock"):
            if not home.is_dir():
                say(f"fetching {name} (once, up to 90 MB)")
                _fetch(home, coordinates)
    return home


def _fetch(home: Path, coordinates: Sequence[str]) -> None:
    try:
        from jgo.config import GlobalSettings
        from jgo.constants import MAVEN_CENTRAL_URL
        from jgo.maven import MavenContext
    except ImportError as why:
        raise ClusterFailed(
            f"{why.name} is not installed; Hadoop's jars come with: "
            "pip install 'weightyard[cluster]'"
        ) from None
    for left in home.parent.glob(f"{home.name}.*/"):
        shutil.rmtree(left, ignore_errors=True)  # of a fetch that was killed: we hold the lock
    staging = Path(tempfile.mkdtemp(prefix=f"{home.name}.", dir=home.parent))
    try:
        # A repository of its own, not ~/.m2: jgo does not lock it, so another resolver at work
        # there at the same time makes both fail.
        context = MavenContext(
            repo_cache=staging / "m2",
            remote_repos={"central": MAVEN_CENTRAL_URL} | GlobalSettings.load().repositories,
            timeout=60,
        )
        try:
            # Not by jgo's environments: they fetch a JDK of their own, to look into each jar.
            asked = [context.create_dependency(one) for one in coordinates]
            named, needed = context.resolver.resolve(asked)
            artifacts = [one.artifact for one in named]
            artifacts += [one.artifact for one in needed if one.scope in _SCOPES]
            fetched = {artifact.resolve() for artifact in artifacts}
        except Exception as why:
            raise ClusterFailed(f"Hadoop's jars could not be fetched: {why!r}") from why
        ready = staging / "ready"
        (ready / "jars").mkdir(parents=True)
        for jar in fetched:
            shutil.copyfile(jar, ready / "jars" / jar.name)
        _, artifact, version = coordinates[0].split(":")
        if not (ready / "jars" / f"{artifact}-{version}.jar").exists():
            raise ClusterFailed(f"Maven gave no jar for {coordinates[0]}")
        ready.rename(home)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        give_up = time.monotonic() + FETCH_TIMEOUT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise ClusterFailed(
                        f"another process holds {path} and has not fetched Hadoop's jars within "
                        f"{FETCH_TIMEOUT_S} s"
                    ) from None
                time.sleep(0.2)
        yield
