"""libhdfs where a Hadoop client is installed: its JVM needs to be told where the classes are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weightyard.errors import Unsupported
from weightyard.settings import Settings
from weightyard.storage.hdfs.installed import provide_classes


@pytest.fixture(autouse=True)
def _no_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLASSPATH", "")


def installed(home: Path, script: str) -> Settings:
    command = home / "bin" / "hadoop"
    command.parent.mkdir(parents=True)
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    return Settings(hadoop_home=home)


def test_the_classes_of_the_installed_hadoop_are_found(tmp_path: Path) -> None:
    said = '[ "$*" = "classpath --glob" ] && echo /opt/conf:/opt/hadoop/common.jar'
    provide_classes(installed(tmp_path, said))
    assert os.environ["CLASSPATH"] == "/opt/conf:/opt/hadoop/common.jar"


def test_classes_that_were_named_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLASSPATH", "/mine.jar")
    provide_classes(installed(tmp_path, "echo /theirs.jar"))
    assert os.environ["CLASSPATH"] == "/mine.jar"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo no JAVA_HOME >&2; exit 1", "no JAVA_HOME"),
        ("true", "no classes"),
        ("head -c 200000 /dev/zero | tr '\\0' x", "no classes"),
    ],
)
def test_a_hadoop_that_does_not_say_is_no_way_to_read(
    tmp_path: Path, script: str, said: str
) -> None:
    with pytest.raises(Unsupported, match=f"{said}.*set CLASSPATH"):
        provide_classes(installed(tmp_path, script))
    with pytest.raises(Unsupported, match="set CLASSPATH"):
        provide_classes(Settings(hadoop_home=tmp_path / "elsewhere"))
    assert os.environ["CLASSPATH"] == ""
