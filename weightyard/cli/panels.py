"""Panels: the groups in which `--help` shows the commands."""

from __future__ import annotations

import enum


class Panel(enum.StrEnum):
    """Whom a command is for: those who use models, run a yard, or work on weightyard."""

    MODELS = "Models"
    OPERATE = "Operate"
    DEVELOP = "Develop"
