"""Resuming: which checkpoint of a run to go on from, when some cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weightyard.errors import Damaged, NoSuchThing, RankFailed
from weightyard.logs import Log
from weightyard.names import ModelName, Ref, Step
from weightyard.trainer.job import Job
from weightyard.transfer.catalogue import Catalogue

_log = Log(__name__)

_LOOKED_AT = 100
"""Newest checkpoints among which a resume looks for one that is not damaged."""


def checkpoints_to_resume(
    catalogue: Catalogue, run: ModelName, step: Step | None = None
) -> list[str]:
    """The refs of checkpoints not known to be damaged, newest first; with `step`, only that one's.

    Empty if the run has none. Raises NoSuchThing for a step that is not there, Damaged if all of
    the newest are damaged.
    """
    if step is not None:
        return [catalogue.resolve(Ref(run, step)).ref]
    try:
        found = catalogue.versions(run, limit=_LOOKED_AT)
    except NoSuchThing:
        return []
    for version in found:
        if version.damaged:
            _log.warning("run.checkpoint_damaged", checkpoint=version.ref, step=version.step)
    whole = [version.ref for version in found if not version.damaged]
    if found and not whole:
        raise _all_damaged(run, len(found), "found by `check`")
    return whole


def checkpoint_to_resume(catalogue: Catalogue, run: ModelName) -> str | None:
    """The newest of these; None if there is none."""
    return next(iter(checkpoints_to_resume(catalogue, run)), None)


def load_newest(
    job: Job, run: ModelName, refs: Sequence[str], load: Callable[[str], None]
) -> str | None:
    """Load the first checkpoint that is whole. Returns its ref, the same on all ranks.

    None if there are none at all. If one turns out to be damaged, what was loaded of it is replaced
    by the next. Raises what loading raises; RankFailed; Damaged if none is whole.
    """
    damage = ""
    for ref in refs:
        if not (damage := _damage(job, ref, load)):
            return ref
    if refs:
        raise _all_damaged(run, len(refs), damage)
    return None


def _damage(job: Job, ref: str, load: Callable[[str], None]) -> str:
    """Load a checkpoint. Returns what is wrong with it, if only on some ranks; empty: nothing."""
    failures: list[Damaged | RankFailed] = []

    def is_whole_here() -> bool:
        try:
            load(ref)
        except (Damaged, RankFailed) as why:
            failures.append(why)
        return not any(isinstance(why, Damaged) for why in failures)

    if not all(job.all(is_whole_here, "loading a checkpoint")):
        reason = str(failures[0]) if failures else f"{ref}: another rank found it damaged"
        _log.warning("run.checkpoint_damaged", checkpoint=ref, reason=reason)
        return reason
    if failures:
        raise failures[0]
    return ""


def _all_damaged(run: ModelName, number: int, last: str) -> Damaged:
    return Damaged(f"{run}: the newest {number} checkpoints are damaged; the last one: {last}")
