"""Whether a number is what was asked for, in words of the page."""

from __future__ import annotations


def at_least(value: float, asked: float, what: str) -> str:
    return f"**{value:.2f}×** {what}; asked: {asked:g}× or more{verdict(value >= asked)}"


def at_most(value: float, asked: float, what: str, unit: str = "", digits: int = 2) -> str:
    said = f"**{value:.{digits}f}{unit}** {what}; asked: {asked:g}{unit} or less"
    return f"{said}{verdict(value <= asked)}"


def verdict(is_reached: bool) -> str:
    return "" if is_reached else " – **missed**"
