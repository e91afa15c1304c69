"""What the docs show is run, and what they link to exists."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.filterwarnings("ignore::Warning:pytorch_lightning")  # of workers, loggers and such
@pytest.mark.filterwarnings("ignore::Warning:lightning_fabric")
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_headings_in_the_docs_have_them(page: Path) -> None:
    for target, heading in re.findall(r"\]\(([^):#]*)#([^)]+)\)", page.read_text()):
        linked = page.parent / target if target else page
        assert heading in _headings(linked), f"{page.name} links to {target}#{heading}"


def _headings(page: Path) -> set[str]:
    """As links name them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_module_says_in_its_first_line_what_it_is_and_the_map_has_it() -> None:
    written = runpy.run_path(str(ROOT / "docs" / "modules.py"))["module_map"]()
    assert (ROOT / "docs" / "modules.md").read_text() == written, "write it anew: make map"
    assert ".py`: \n" not in written


def test_the_readme_names_the_make_verbs_that_exist() -> None:
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for verb in re.findall(r"`make ([a-z-]+)`", page.read_text()):
            assert verb in verbs, f"{page.name} names make {verb}"


def test_the_readmes_commands_say_what_it_shows(tmp_path: Path) -> None:
    """Those on the reader's own model, line by line. Numbers are those of the model at hand."""
    shown = next(one for one in _blocks(ROOT / "README.md", "console") if "./tuned" in one)
    _save_model(tmp_path / "model", seed=0)
    _save_model(tmp_path / "tuned", seed=1)
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    places = {name: str(tmp_path / name) for name in ("WEIGHTYARD_HOME", "WEIGHTYARD_CACHE")}
    environment = {
        **{name: value for name, value in os.environ.items() if "WEIGHTYARD" not in name},
        **places,
        "PATH": programs,
        "COLUMNS": "120",
    }
    told = ""
    for line in shown.splitlines():
        if line.startswith("$ "):
            command = line.removeprefix("$ ")
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.returncode == 0, f"{command}: {done.stderr}"
            told += f"{line}\n{done.stdout}"
    assert _without_numbers(told) == _without_numbers(shown)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "tuned" / "model.safetensors"
    ).read_bytes()


def _save_model(folder: Path, seed: int) -> None:
    """Sixteen layers, of which the seventh is what a seed makes of it."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    layers = {
        f"layers.{number}.weight": np.random.default_rng(number if number != 7 else 100 + seed)
        .standard_normal((256, 512))
        .astype("<f4")
        for number in range(16)
    }
    save_file(layers, folder / "model.safetensors")


def _without_numbers(text: str) -> str:
    return re.sub(r"[0-9a-f]{64}|[0-9]+(\.[0-9]+)?|\s+", " ", text)
