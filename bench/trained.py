"""States of trainings, made by every rank for itself, the same whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

WIDTH = 2048
GROUPS = 24
"""Rows of a tensor are made in so many groups: 2, 3, 4 and 8 ranks get whole ones."""

MOMENTS = {"weight": 0.02, "exp_avg": 1e-4, "exp_avg_sq": 1e-8}
"""What AdamW keeps of a layer, and how large its values are."""


def dense_shape(length: int) -> tuple[int, int]:
    """Layers, and rows of each of their tensors, of a dense state of about so many bytes."""
    layers = max(1, min(16, length // (1 << 26)))
    group_bytes = len(MOMENTS) * WIDTH * 4 * GROUPS
    return layers, GROUPS * max(1, length // (layers * group_bytes))


def dense_bytes(length: int) -> int:
    """How many they are."""
    layers, rows = dense_shape(length)
    return layers * (len(MOMENTS) * rows + 1) * WIDTH * 4


class Dense:
    """A dense fp32 training: weights and both moments of AdamW, cut over all ranks by rows.

    Each layer has a small tensor that all ranks hold, too.
    """

    def __init__(self, length: int, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._rank, self._ranks = mesh.get_local_rank(), mesh.size()
        self._layers, self._rows = dense_shape(length)

    def made(self) -> dict[str, Any]:
        state = self.empty()
        for name, tensor, parts in self._parts(state):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for start, values in parts:
                local[start : start + len(values)] = values
            assert name in state
        return {**state, "step": 1200}

    def empty(self) -> dict[str, Any]:
        """The same tensors, to be loaded into."""
        rows = self._rows // self._ranks
        state: dict[str, Any] = {"step": 0}
        for layer in range(self._layers):
            for kind in MOMENTS:
                local = torch.zeros(rows, WIDTH)
                state[f"layers.{layer}.{kind}"] = DTensor.from_local(local, self._mesh, [Shard(0)])
            state[f"layers.{layer}.norm"] = torch.zeros(WIDTH)
        return state

    def require_same(self, state: dict[str, Any]) -> None:
        """Raises ValueError unless this is what was made."""
        for name, tensor, parts in self._parts(state):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for start, values in parts:
                if not torch.equal(local[start : start + len(values)], values):
                    raise ValueError(f"{name} is not what was saved")
        if state["step"] != 1200:
            raise ValueError("the step is not what was saved")

    def _parts(self, state: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor, Iterator[Any]]]:
        for layer in range(self._layers):
            for number, (kind, scale) in enumerate(MOMENTS.items()):
                name = f"layers.{layer}.{kind}"
                yield name, state[name], self._rows_of([layer, number], scale, kind)
            norm = f"layers.{layer}.norm"
            yield norm, state[norm], iter([(0, torch.full((WIDTH,), 1.0 + layer))])

    def _rows_of(self, seed: list[int], scale: float, kind: str) -> Iterator[tuple[int, Any]]:
        """This rank's groups of rows, and where they begin in its part."""
        share, rows = GROUPS // self._ranks, self._rows // GROUPS
        for at in range(share):
            random = np.random.default_rng([*seed, self._rank * share + at])
            values = random.standard_normal((rows, WIDTH), np.float32) * np.float32(scale)
            yield at * rows, torch.from_numpy(np.abs(values) if kind == "exp_avg_sq" else values)


class Learner(nn.Module):
    """A small transformer that is trained for real."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.out = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        out: torch.Tensor = self.out(hidden)
        return out


KINDS = (
    "frozen trunk",
    "adapters only",
    "sparse embedding",
    "dense bf16 with fp32 master weights",
)


class Kind:
    """One of four kinds of training, of about so many bytes of weights, in one process."""

    def __init__(self, kind: str, length: int) -> None:
        torch.manual_seed(0)
        self.kind = kind
        width = 1024 if length >= 1 << 26 else 256
        count = max(2, length // (width * width * 4))
        self._width = width
        self.masters: list[torch.Tensor] = []
        if kind == "sparse embedding":
            self.model: nn.Module = nn.Embedding(count * width, width, sparse=True)
            self.optimizer: Any = torch.optim.SparseAdam(self.model.parameters(), lr=1e-3)
            ids = np.random.default_rng(0).zipf(1.2, 1 << 20) - 1
            self._ids = torch.from_numpy(ids[ids < count * width])
            return
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))
        if kind == "adapters only":
            for layer in self.model:
                layer.requires_grad_(False)
            self.adapters = nn.ModuleList(
                nn.Sequential(nn.Linear(width, 8, bias=False), nn.Linear(8, width, bias=False))
                for _ in range(count)
            )
            self.optimizer = torch.optim.AdamW(self.adapters.parameters(), lr=1e-3)
        elif kind == "frozen trunk":
            for layer in list(self.model)[:-1]:
                layer.requires_grad_(False)
            self.optimizer = torch.optim.AdamW(self.model[-1].parameters(), lr=1e-3)
        else:
            self.masters = [one.detach().clone() for one in self.model.parameters()]
            self.model.to(torch.bfloat16)
            self.optimizer = torch.optim.AdamW(self.masters, lr=1e-5)

    def step(self) -> None:
        if self.kind == "sparse embedding":
            picked = self._ids[torch.randint(len(self._ids), (256,))]
            self.model(picked).square().mean().backward()
        else:
            self._dense().backward()
        if self.masters:
            for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
                master.grad = parameter.grad.float() if parameter.grad is not None else None
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.zero_grad()
        if self.masters:
            with torch.no_grad():
                for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
                    parameter.copy_(master)

    def _dense(self) -> torch.Tensor:
        dtype = next(self.model.parameters()).dtype
        batch = torch.randn(8, self._width, dtype=dtype)
        hidden = batch
        for at, layer in enumerate(self.model):
            hidden = torch.tanh(layer(hidden))
            if self.kind == "adapters only":
                hidden = hidden + self.adapters[at](hidden)
        return (hidden - batch).square().mean()

    def state(self) -> dict[str, torch.Tensor]:
        """All tensors of it, by name."""
        state = {f"model.{name}": one for name, one in self.model.state_dict().items()}
        if self.kind == "adapters only":
            state |= {f"adapters.{name}": one for name, one in self.adapters.state_dict().items()}
        state |= {f"master.{at}": one for at, one in enumerate(self.masters)}
        for at, entries in self.optimizer.state_dict()["state"].items():
            for key, value in entries.items():
                state[f"optim.{at}.{key}"] = torch.as_tensor(value)
        return state
