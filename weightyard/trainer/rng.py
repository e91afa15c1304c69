"""Random numbers: the generators of Python, NumPy and torch of one rank, saved and put back.

If the number of ranks is unchanged, a rank goes on with the numbers it would have drawn. If it is
another, that is impossible, and each generator begins anew from (seed, step, rank).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from weightyard.errors import DoesNotFit


class Rng:
    """This process's global generators. Obeys torch's Stateful."""

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {
            "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
            "numpy": _told(np.random.get_state(legacy=False)),
            "torch": torch.get_rng_state(),
        }
        if (device := _accelerator()) is not None:
            state["device"] = {
                "type": device.type,
                "state": torch.get_device_module(device).get_rng_state(),
            }
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises DoesNotFit if it is not the state of generators such as these.

        It is no Damaged: the bytes were checked when they were read, so the state is of other
        generators, or versions, and older checkpoints will not help.
        """
        part = "python"
        try:
            python = state["python"]
            words = tuple(python["words"].tolist())
            random.setstate((python["version"], words, python["gauss"]))
            part = "numpy"
            _set_numpy(state["numpy"])
            part = "torch"
            torch.set_rng_state(state["torch"])
            part = "device"
            device, saved = _accelerator(), state.get("device")
            if device is not None and saved is not None and saved["type"] == device.type:
                torch.get_device_module(device).set_rng_state(saved["state"])
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as why:
            raise DoesNotFit(
                f"rng.{part}: the saved state is not of a generator such as the one here: {why}; "
                "to go on with other random numbers give exclude_from_loading=['rng']",
                [f"rng.{part}"],
                [],
            ) from why


def _set_numpy(state: Mapping[str, Any]) -> None:
    kind = np.random.get_state(legacy=False)["bit_generator"]
    if (saved := state["bit_generator"]) != kind:
        raise ValueError(
            f"saved of {saved!r:.40}, and {kind} is set by np.random.set_bit_generator"
        )
    np.random.set_state(_heard(state))


def derive(seed: int, step: int, rank: int) -> None:
    """Let all generators of this process begin from a seed made of these three."""
    for_torch, for_python, for_numpy = np.random.SeedSequence([seed, step, rank]).spawn(3)
    torch.manual_seed(int(for_torch.generate_state(1, np.uint64)[0]))
    random.seed(int(for_python.generate_state(1, np.uint64)[0]))
    np.random.seed(for_numpy.generate_state(4))


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def _told(node: Any) -> Any:
    """NumPy's values as those a checkpoint can hold; an array as a tensor."""
    match node:
        case dict():
            return {key: _told(one) for key, one in node.items()}
        case np.ndarray():
            return torch.from_numpy(node.astype(np.int64))
        case np.generic():
            return node.item()
        case _:
            return node


def _heard(node: Any) -> Any:
    if isinstance(node, torch.Tensor):
        return node.numpy().astype(np.uint32)
    if isinstance(node, dict):
        return {key: _heard(one) for key, one in node.items()}
    return node
