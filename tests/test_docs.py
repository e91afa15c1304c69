"""What the docs show is run, and what they link to exists."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_in_the_docs_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEIGHTYARD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WEIGHTYARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("WEIGHTYARD_STORE", raising=False)
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text("{}")
    save_file({"weight": np.zeros((4, 4), "<f4")}, tmp_path / "my-model" / "model.safetensors")
    for block in _blocks(page, "python"):
        exec(compile(block, str(page), "exec"), {"__name__": "docs"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_in_the_docs_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_names_the_make_verbs_that_exist() -> None:
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for verb in re.findall(r"`make ([a-z-]+)`", page.read_text()):
            assert verb in verbs, f"{page.name} names make {verb}"
