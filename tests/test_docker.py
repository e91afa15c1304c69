from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("file", ["tests/conftest.py", "tests/storage/test_hdfs_store.py"])
def test_what_the_contract_imports_is_in_the_image_that_runs_it(file: str) -> None:
    copied = re.findall(r"^COPY (\w+) \1$", (ROOT / "docker/Dockerfile").read_text(), re.MULTILINE)
    sent = re.findall(r"^!(\w+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    needed = _folders_imported_by(ROOT / file)
    assert "weightyard" in needed
    assert needed <= {*copied} & {*sent}


def _folders_imported_by(file: Path) -> set[str]:
    """Top-level packages of the repository; what is installed from elsewhere is not looked at."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
    return {name for name in names if (ROOT / name / "__init__.py").exists()}


def test_the_image_that_runs_the_contract_has_the_plugins_that_pytest_is_set_up_for() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    plugins = {
        name for one in extras["dev"] if (name := re.split(r"[^\w-]", one)[0]).startswith("pytest")
    }
    assert "pytest" in plugins
    assert plugins <= {*(ROOT / "docker/Dockerfile").read_text().split()}
