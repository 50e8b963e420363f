"""Which checkpoint of a run's folder can be used: to resume from, and as the best."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from unbroken.storage.checkpoint_files import damage, read_or_reason
from unbroken.storage.contents import record_in
from unbroken.storage.files import copy_atomically


def checkpoint_to_resume(last: Path, best: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint that a run is resumed from; and a line for each that is skipped.

    That is ``last``, or else ``best``. A ``best`` inside an epoch of data that cannot be started
    there is taken only where a damaged ``last`` would lose more than this epoch.
    """
    skipped: list[str] = []
    for path in (last, best):
        if not path.exists():
            continue
        checkpoint, reason = read_or_reason(path)
        is_best_alone = path == best and not last.exists()
        if reason is None and is_best_alone and not can_resume_from(checkpoint):
            reason = f"{path} is inside an epoch, and its data cannot be started there."
        if reason is None:
            return path, skipped
        skipped.append(f"skipped: {reason}")
    return None, skipped


def can_resume_from(checkpoint: dict[str, Any]) -> bool:
    """Whether a resume from a checkpoint is exact, as far as its place and loaders are concerned.

    It is not in a new best inside an epoch of data that cannot be started there.
    """
    return record_in(checkpoint).get("can_go_on") is not False


def usable_best(best: Path, run_id: str | None) -> tuple[dict[str, Any], str | None]:
    """The contents of ``best``, and None; or nothing, and why it cannot be used.

    One that is damaged, or belongs to another run, is renamed.
    """
    if not best.exists():
        return {}, f"{best} is missing;"
    checkpoint, reason = read_or_reason(best)
    if reason is None and record_in(checkpoint).get("run_id") != run_id:
        reason = f"{best} belongs to another run."
    if reason is None:
        return checkpoint, None
    aside = best.with_suffix(".ckpt.set-aside")
    number = 1
    # One that was set aside before stays.
    while os.path.lexists(aside):
        number += 1
        aside = best.with_suffix(f".ckpt.set-aside-{number}")
    os.replace(best, aside)
    return {}, f"{reason} It was set aside;"


def replace_damaged_last(last: Path, best: Path) -> None:
    """Copy ``best`` where ``last`` is damaged, because nothing else would do so."""
    if damage(last) is not None and best.exists():
        copy_atomically(best, last)
