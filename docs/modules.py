"""Writes docs/modules.md: every module of the package, in the words of its own first line."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "modules.md"

_HEAD = """\
# The modules

Every module in the words of its own first line; `make map` writes this page. What belongs together,
and which part may import which, is in [CONTRIBUTING.md](../CONTRIBUTING.md#the-map).
"""


def module_map() -> str:
    """The page as it should be."""
    parts = [_HEAD]
    folders = sorted({file.parent for file in (ROOT / "weightyard").rglob("*.py")})
    for folder in folders:
        modules = sorted(folder.glob("*.py"))
        about = "".join(_first_line(one) for one in modules if one.stem == "__init__")
        lines = [
            f"- `{one.name}`: {_first_line(one)}\n" for one in modules if one.stem != "__init__"
        ]
        title = f"## {folder.relative_to(ROOT).as_posix()}\n"
        parts.append("\n".join(filter(None, [title, about and f"{about}\n", "".join(lines)])))
    return "\n".join(parts)


def _first_line(module: Path) -> str:
    text = ast.get_docstring(ast.parse(module.read_text())) or ""
    return text.partition("\n\n")[0].replace("\n", " ")


if __name__ == "__main__":
    PAGE.write_text(module_map())
