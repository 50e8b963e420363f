"""What commands use of a run's ``summary.json``, which may be a stranger's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unbroken.storage.reading import read_json
from unbroken.tables import is_number

# What of a summary.json is used, and of which type it is
FIELDS: Mapping[str, tuple[type, ...]] = {
    "run_name": (str,),
    "finished": (bool,),
    "monitor": (str,),
    "epochs": (int,),
    "steps": (int,),
    "fit_seconds": (int, float),
    "date": (str,),
    "data_source": (str,),
    "train_samples": (int,),
    "hardware": (str,),
    "command": (str,),
    "git_commit": (str,),
}
VERSIONS = "versions"
SPLITS = ("val", "test")
# Results of a run, and characters of the name of one and of a text
MOST_RESULTS = 1_000
LONGEST_NAME = 200
LONGEST_FACT = 10_000


def read_summary(path: Path) -> tuple[dict[str, Any], int]:
    """What is used of a run's ``summary.json``: facts that have their types, and the results of
    validation and test, of very many the first. And how many results are left out.
    """
    content = read_json(path)
    found: dict[str, Any] = {}
    for name, kinds in FIELDS.items():
        if name in content and _is_fact(content[name], kinds):
            found[name] = content[name]
    versions = content.get(VERSIONS)
    if isinstance(versions, dict):
        texts = {name: text for name, text in versions.items() if _is_fact(text, (str,))}
        found[VERSIONS] = dict(list(texts.items())[:MOST_RESULTS])
    # The followed metric comes first, then the same one of the test.
    followed = found.get("monitor", "")
    firsts = (followed, f"test/{followed.rpartition('/')[2]}", followed.replace("val", "test", 1))
    others = [name for name in content if name.startswith(SPLITS)]
    results = [
        name
        for name in dict.fromkeys([*firsts, *others])
        if name not in FIELDS and is_number(content.get(name)) and len(name) <= LONGEST_NAME
    ]
    kept = {name: content[name] for name in results[:MOST_RESULTS]}
    return found | kept, len(results) - len(kept)


def _is_fact(value: Any, kinds: tuple[type, ...]) -> bool:
    if type(value) not in kinds:
        return False
    if isinstance(value, str):
        return len(value) <= LONGEST_FACT
    return isinstance(value, bool) or is_number(value)
