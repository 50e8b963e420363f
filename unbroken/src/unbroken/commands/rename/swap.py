"""Puts new files in the place of old ones, as a program: ``python -I swap.py WORKPLACE``.

It imports nothing but Python's own modules: the library itself may be among the files that go. The
list of what is to do stands in a file. Each step may be done twice, also by two processes at once,
so that a second start finishes what a first one has left.
"""

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

# In the workplace: the list, its name from when it is begun, and the folder of the new files.
# A list that nobody has begun may be dropped. To begin and to drop are each a change of its name,
# so that only one of both can happen.
PLAN = "plan.json"
BEGUN = "begun.json"
NEW = "new"


def main(workplace: Path) -> None:
    """Work off the list, and remove the workplace."""
    with suppress(FileNotFoundError):  # it was begun before
        os.replace(workplace / PLAN, workplace / BEGUN)
    try:
        plan = json.loads((workplace / BEGUN).read_text(encoding="utf-8"))
    except FileNotFoundError:
        # Another process has just finished or dropped it.
        return
    folder = Path(plan["folder"])
    # New files come first, so that there is a package to start this command from at any time.
    for name in plan["put"]:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # it is in place already
            os.replace(workplace / NEW / name, target)
    for name in plan["gone"]:
        (folder / name).unlink(missing_ok=True)
    for name in plan["gone"]:
        remove_empty_folders(folder / name, folder)
    with suppress(OSError):
        # Git then shows files that have moved as such.
        subprocess.run(["git", "add", "--all"], cwd=folder, capture_output=True, check=False)
    shutil.rmtree(workplace / NEW, ignore_errors=True)
    # The list goes last: as long as it is there, nobody else uses the workplace.
    (workplace / BEGUN).unlink(missing_ok=True)
    with suppress(OSError):
        workplace.rmdir()


def remove_empty_folders(path: Path, top: Path) -> None:
    """Remove the folders above a path that hold nothing but what Python has compiled."""
    for folder in path.parents:
        if folder == top:
            return
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)
        try:
            folder.rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]))
