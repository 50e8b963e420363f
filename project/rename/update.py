"""Brings later changes of the template into a package that was made from it.

The template is made into this package twice: as it was then, and as it is now. What lies between
the two is applied to the clone as git applies a commit, with this package's own changes kept.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path

from project.errors import UserError
from project.rename.clone import Clone
from project.rename.make import ORIGIN, Origin, make

# Commits of the two trees need a name; the user's own commit has the user's.
IDENTITY = ("-c", "user.name=template", "-c", "user.email=template@localhost")
UNSIGNED = ("-c", "commit.gpgsign=false", "-c", "core.hooksPath=/dev/null")


def update(clone: Clone, source: str) -> int:
    """Apply the template's later changes; returns 1 where there are conflicts to be solved."""
    origin = Origin.of(clone.folder)
    if origin is None:
        raise UserError(
            f"--update needs {ORIGIN}, which rename writes: this clone was not made by it."
        )
    clone.refuse_uncommitted()
    with tempfile.TemporaryDirectory(prefix="template-") as scratch:
        template = Clone(Path(scratch) / "template", origin.package)
        fetch(source, template.folder)
        newest = template.git("rev-parse", "HEAD").strip()
        if newest == origin.commit:
            print(f"nothing to do: {source} is where this package was made from.")
            return 0
        check_has(template, origin, source)
        before = commit_made(template, origin, origin.commit, parent=None)
        after = commit_made(template, origin, newest, parent=before)
        clone.git("fetch", "--quiet", "--no-tags", str(template.folder), after)
    return apply(clone, origin, newest, after)


def fetch(source: str, folder: Path) -> None:
    """Clone the template; a UserError where that fails."""
    if os.path.exists(os.path.expanduser(source)):
        source = os.path.abspath(os.path.expanduser(source))
    command = ["git", "clone", "--quiet", "--no-checkout", "--", source, str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError("git is needed for an update and was not found. Install it.") from None
    except subprocess.CalledProcessError as error:
        reason = " ".join(error.stderr.split())
        raise UserError(
            f"--update must be the template's folder or address, got {source} ({reason})."
        ) from None


def check_has(template: Clone, origin: Origin, source: str) -> None:
    """A UserError where the template does not have the commit that the package was made from."""
    try:
        template.git("cat-file", "-e", f"{origin.commit}^{{commit}}")
    except UserError:
        raise UserError(
            f"--update must be the template that this package was made from, got {source}, which "
            f"lacks commit {origin.commit[:10]}. In {ORIGIN}, name one that it has."
        ) from None


def commit_made(template: Clone, origin: Origin, commit: str, parent: str | None) -> str:
    """Make this package of a commit of the template; returns the commit that holds the result."""
    template.git("checkout", "--quiet", "--force", "--detach", commit)
    template.git("clean", "--quiet", "-d", "--force", "-x")
    known = template.features().files
    gone = [name for name in origin.without if name in known]
    made = Origin(commit, origin.package, origin.name, origin.without)
    make(template, origin.name, gone, made)
    tree = template.git("write-tree").strip()
    parents = ("-p", parent) if parent else ()
    message = ("-m", f"The template at {commit}")
    made_commit = template.git(*IDENTITY, *UNSIGNED, "commit-tree", tree, *parents, *message)
    # A branch, so that it can be fetched
    template.git("branch", "--force", f"made-{commit[:10]}", made_commit.strip())
    return made_commit.strip()


def apply(clone: Clone, origin: Origin, newest: str, after: str) -> int:
    """Apply a commit to the clone without committing, and say what is left to do."""
    command = ["git", *UNSIGNED, "cherry-pick", "--no-commit", after]
    ended = subprocess.run(command, cwd=clone.folder, capture_output=True, text=True)
    conflicts = clone.git("diff", "--name-only", "--diff-filter=U").splitlines()
    if ended.returncode and not conflicts:
        raise UserError(f"the changes could not be applied: {' '.join(ended.stderr.split())}")
    changed = clone.git("diff", "--name-only", "HEAD").splitlines()
    print(f"{len(changed)} files changed from {origin.commit[:10]} to {newest[:10]}.")
    print_conflicts(conflicts)
    print("Look at it with git diff HEAD; git reset --hard undoes it. To keep it:")
    print(f"  git add --all && git commit -m 'Update to template {newest[:10]}'")
    return 1 if conflicts else 0


def print_conflicts(conflicts: Collection[str]) -> None:
    """Name the files that both sides have changed in the same place."""
    if conflicts:
        print(f"{len(conflicts)} of them need you, for both sides changed the same lines:")
        for name in conflicts:
            print(f"  {name}")
