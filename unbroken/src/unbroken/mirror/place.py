"""Whose a run's folder in a mirror is: a run writes into an empty one, or into one of its own."""

from __future__ import annotations

from unbroken.errors import UserError
from unbroken.mirror import lease
from unbroken.mirror.copying import find_begun, find_manifests
from unbroken.mirror.manifest import FOLDER
from unbroken.mirror.store import Store


def refuse_a_place_of_others(root: Store, run_name: str) -> None:
    """A UserError where a run's folder in a mirror holds something, and no mirror has written it;
    or where something in it is a link: a mirror would write where that leads to.

    Raises:
        Exception: What the store's package raises where the store does not answer.
    """
    store = root.below(run_name)
    kind = "directory"
    # Where there are no folders, there are no links, and the root may not be listed.
    if root.has_folders:
        kind = root.kinds().get(run_name, kind)
    if kind == "other":
        raise link(store.shown)
    for folder in ("", FOLDER):
        for name, kind_below in store.kinds(folder).items():
            if kind_below == "other":
                raise link("/".join(filter(None, (store.shown, folder, name))))
    names = store.names()
    if names and (kind == "file" or not is_of_a_mirror(store)):
        raise UserError(
            f"--mirror: {store.shown} is no mirror of a run, and is not empty (it holds"
            f" {names[0]}). Name another folder, or the run otherwise (--run_name)."
        )


def link(shown: str) -> UserError:
    """What is told of a link in a mirror, or of a pipe."""
    return UserError(
        f"--mirror: {shown} is a link or no file, and a mirror writes through none. Remove it, or"
        " name another folder."
    )


def is_of_a_mirror(store: Store) -> bool:
    """Whether a whole manifest or lease lies there, which are the first that a mirror writes."""
    manifests = [*find_manifests(store).values(), *find_begun(store).values()]
    return any(manifest is not None for manifest in manifests) or lease.is_there(store)
