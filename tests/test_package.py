"""The package as its users get it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import weightyard
from weightyard import testing

ROOT = Path(__file__).parent.parent
LIMIT_S = 600.0

pytestmark = pytest.mark.timeout(3 * LIMIT_S)

HEAVY = ("fastapi", "sqlalchemy", "torch", "pyarrow", "hdfs_native", "hdfs", "jgo")


def run(*command: str | Path, **options: object) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=LIMIT_S, **options
    )  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and its core dependencies, nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    uv = Path(sys.executable).with_name("uv")
    run(uv, "build", "--quiet", "--wheel", "--out-dir", folder / "dist", ROOT)
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    (wheel,) = (folder / "dist").glob("*.whl")
    run(uv, "pip", "install", "--quiet", "--python", python,
        "--constraint", ROOT / "constraints.txt", wheel)  # fmt: skip
    return python.parent


def test_the_names_people_import_stay_what_they_are() -> None:
    assert weightyard.__all__ == ["Yard", "load", "open", "pull", "push"]
    assert testing.__all__ == ["FaultyStore", "MiniCluster", "StoreContract"]
    for module in (weightyard, testing):
        assert all(hasattr(module, name) for name in module.__all__)


def test_the_wheel_installs_bare_and_does_the_main_job(bare: Path, tmp_path: Path) -> None:
    shown = run(bare / "python", ROOT / "examples" / "first_model.py", cwd=tmp_path)
    assert "Every file came back bit for bit" in shown


def test_a_model_is_pushed_and_pulled_with_the_migrations_that_the_wheel_ships(
    bare: Path, tmp_path: Path
) -> None:
    model, back = tmp_path / "model", tmp_path / "back"
    model.mkdir()
    (model / "config.json").write_text('{"layers": 2}')
    (model / "weights.bin").write_bytes(bytes(range(256)) * 1000)

    def weightyard(*arguments: str | Path) -> str:
        environment = {"PATH": str(bare), "WEIGHTYARD_HOME": str(tmp_path / "yard")}
        return run(bare / "weightyard", *arguments, env=environment, cwd=tmp_path)

    weightyard("push", model, "team/tiny", "--alias", "prod")
    weightyard("pull", "team/tiny@prod", back)
    for file in model.iterdir():
        assert (back / file.name).read_bytes() == file.read_bytes()
    shown = json.loads(weightyard("db", "current", "--json"))
    assert (shown["schema"], shown["is_current"]) == (shown["newest"], True)


def test_the_wheel_has_compiled_code_where_there_is_a_compiler(bare: Path) -> None:
    script = "from weightyard.codec import compiled; print(compiled.is_there())"
    has_compiler = any(map(shutil.which, ("cc", "gcc", "clang")))
    assert run(bare / "python", "-c", script).strip() == str(has_compiler)


def test_without_a_compiler_the_wheel_is_pure_python_and_does_the_main_job(tmp_path: Path) -> None:
    uv = Path(sys.executable).with_name("uv")
    environment = {**os.environ, "PATH": str(tmp_path), "CC": ""}
    run(uv, "build", "--quiet", "--wheel", "--python", sys.executable,
        "--out-dir", tmp_path, ROOT, env=environment)  # fmt: skip
    (wheel,) = tmp_path.glob("*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as package:
        package.extractall(tmp_path / "pure")
    environment["PYTHONPATH"] = str(tmp_path / "pure")

    first_model = ROOT / "examples" / "first_model.py"
    shown = run(sys.executable, first_model, cwd=tmp_path, env=environment)
    script = "from weightyard.codec import compiled; print(compiled.is_there(), compiled.__file__)"
    found = run(sys.executable, "-c", script, cwd=tmp_path, env=environment)

    assert "Every file came back bit for bit" in shown
    assert found.split() == ["False", str(tmp_path / "pure/weightyard/codec/compiled.py")]


def test_a_compiler_that_is_called_by_another_program_compiles(tmp_path: Path) -> None:
    """As `ccache gcc` is; `env` stands for it, which is everywhere."""
    compiler = next((one for one in ("cc", "gcc", "clang") if shutil.which(one)), None)
    if compiler is None:
        pytest.skip("there is no C compiler")
    uv = Path(sys.executable).with_name("uv")
    run(uv, "build", "--quiet", "--wheel", "--out-dir", tmp_path, ROOT,
        env={**os.environ, "CC": f"env {compiler}"})  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    assert not wheel.name.endswith("-none-any.whl")


def test_both_names_of_the_command_work_from_the_wheel(bare: Path) -> None:
    for name in ("weightyard", "wy"):
        assert "cluster" in run(bare / name, "--help")
        assert re.search(r"\d+\.\d+", run(bare / name, "--version"))


def test_importing_weightyard_loads_nothing_heavy(bare: Path) -> None:
    script = f"""
import sys
import weightyard, weightyard.transfer.folder, weightyard.storage.opening
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    assert run(bare / "python", "-c", script).strip() == "[]"


def test_the_wheel_is_typed_and_carries_its_licence(bare: Path) -> None:
    script = """
import importlib.metadata as metadata
names = [str(file) for file in metadata.files("weightyard")]
print("weightyard/py.typed" in names, any("LICENSE" in name for name in names))
print([name for name in names if not name.startswith("weightyard") and not name.startswith("..")])
"""
    assert run(bare / "python", "-c", script).split("\n")[:2] == ["True True", "[]"]
