"""Compiles the C code of weightyard/codec into the wheel, where there is a C compiler.

Without one the wheel is pure Python, and NumPy and zstd do the same: slower, never missing
(docs/design/0012-compiled-code.md).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CODEC = Path("weightyard", "codec")
SOURCES = tuple(CODEC / name for name in ("planes.c", "fold.c", "huffman.c", "unhuffman.c"))
LIBRARY = CODEC / "_compiled.so"
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared")
LIMIT_S = 120.0


class CompiledCode(BuildHookInterface):
    """Runs for a wheel and for an editable install, whose library lies beside its source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and say in the wheel's tag for which machines it is then."""
        if self.target_name != "wheel":
            return
        if self._compile(Path(self.root)):
            machine = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{machine}"
            build_data["artifacts"].append(f"/{LIBRARY.as_posix()}")

    def _compile(self, root: Path) -> bool:
        compiler = _compiler()
        sources = [root / source for source in SOURCES]
        if compiler is None or not all(source.is_file() for source in sources):
            self.app.display_warning("no C compiler: blocks are encoded and decoded without it")
            return False
        # Whoever uses the library while it is made anew keeps the old one.
        made = root / LIBRARY.with_suffix(f".{os.getpid()}.so")
        command = [*compiler, *FLAGS, *map(str, sources), "-o", str(made)]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S)
            made.replace(root / LIBRARY)
        except (OSError, subprocess.SubprocessError) as why:
            said = getattr(why, "stderr", b"") or b""
            self.app.display_warning(f"the C code was not compiled: {why}\n{said.decode()}")
            made.unlink(missing_ok=True)
            return False
        return True


def _compiler() -> list[str] | None:
    # What a user names is called with all its words, as in `ccache gcc`. The options of the
    # compiler that Python was built with may name folders of another machine.
    named = shlex.split(os.environ.get("CC") or "")
    python_s = shlex.split(sysconfig.get_config_var("CC") or "")[:1]
    for command in (named, python_s, ["cc"], ["gcc"], ["clang"]):
        if command and shutil.which(command[0]):
            return command
    return None
