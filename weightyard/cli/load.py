"""`weightyard load`: load a version's tensors, to see that it works and how long it takes."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from weightyard.cli.session import Session, command
from weightyard.errors import Unsupported


@command
def load(
    session: Session,
    ref: Annotated[
        str, typer.Argument(metavar="REF", help="PROJECT/NAME, with @ALIAS, @v3 or @DIGEST.")
    ],
    device: Annotated[str, typer.Option(help="Such as cpu, cuda or cuda:1.")] = "cpu",
) -> None:
    """Load a version's tensors onto a device, and say what came and how long it took.

    Needs torch. In a program, use `weightyard.load` instead.

    Example: weightyard load team/bert@prod --device cuda
    """
    from weightyard.cli.refs import resolve
    from weightyard.cli.wording import count, size

    try:
        import torch
    except ImportError:
        raise Unsupported("loading tensors needs torch: install weightyard[torch]") from None
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as why:
        raise Unsupported(f"device {device}: {str(why).partition(chr(10))[0]}") from None
    with session.open() as yard:
        version = resolve(yard, ref)
        began = time.perf_counter()
        tensors = yard.load(version.ref, device=device)
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - began
    amount = sum(tensor.nbytes for tensor in tensors.values())
    result = {
        "ref": version.ref,
        "version": version.number,
        "device": device,
        "tensors": len(tensors),
        "bytes": amount,
        "seconds": round(seconds, 3),
    }
    session.show(
        result,
        lambda console: console.print(
            f"{version.ref}: {count(len(tensors), 'tensor')}, {size(amount)} on {device} in "
            f"{seconds:.2f} s ({size(int(amount / max(seconds, 1e-9)))}/s)",
            markup=False,
        ),
    )
