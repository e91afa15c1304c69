"""Whether a number is what was asked for, in words of the page."""

from __future__ import annotations


def at_least(value: float, asked: float, what: str) -> str:
    shown = _shown(value, asked, 2)
    return f"**{shown}×** {what}; asked: {asked:g}× or more{verdict(value >= asked)}"


def at_most(value: float, asked: float, what: str, unit: str = "", digits: int = 2) -> str:
    said = f"**{_shown(value, asked, digits)}{unit}** {what}; asked: {asked:g}{unit} or less"
    return f"{said}{verdict(value <= asked)}"


def _shown(value: float, asked: float, digits: int) -> str:
    """With a digit more where rounding would make it look like what was asked."""
    shown = f"{value:.{digits}f}"
    return f"{value:.{digits + 1}f}" if float(shown) == asked != value else shown


def verdict(is_reached: bool) -> str:
    return "" if is_reached else " – **missed**"
