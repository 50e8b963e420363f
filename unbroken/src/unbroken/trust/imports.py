"""The gate before each import, while a stranger's configuration is parsed and its objects are made.

A text becomes an import in three places: in the command line's parser, where the type of an
argument is a class or something callable; in :func:`unbroken.tasks.by_name.named_class`; and in the
user's own code. The first two ask for a name, also of what is imported already. The third is seen
where Python looks for a module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from unbroken.lightning_internals import parser_asks_before_it_imports
from unbroken.tasks.by_name import imports_judged_by
from unbroken.trust.strangers import Stranger


class Gate:
    """Stands before all others who look for a module, and finds none itself."""

    def __init__(self, stranger: Stranger) -> None:
        self._stranger = stranger

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Refuse a module that a text of the stranger names, and that is not allowed."""
        self._stranger.refuse_module(name)


@contextmanager
def imports_asked_of(stranger: Stranger) -> Iterator[None]:
    """Inside, what a text of a stranger's file names is imported only where it is allowed."""
    gate = Gate(stranger)
    sys.meta_path.insert(0, gate)
    try:
        with (
            parser_asks_before_it_imports(stranger.refuse_import),
            imports_judged_by(stranger.allows),
        ):
            yield
    finally:
        sys.meta_path.remove(gate)
