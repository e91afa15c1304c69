"""The groups commands are shown in."""

from __future__ import annotations

import enum


class Panel(enum.StrEnum):
    """For whom a command is: who uses models, who runs a yard, who works on weightyard."""

    MODELS = "Models"
    OPERATE = "Operate"
    DEVELOP = "Develop"
