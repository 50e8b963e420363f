"""Names of files and folders that not every system takes."""

import re

# With whatever ending, Windows opens a device in the place of such a file.
DEVICE = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])( *\..*| *)", re.IGNORECASE)


def is_device_of_windows(name: str) -> bool:
    """Whether Windows takes a file's or folder's name for one of its devices, such as ``CON``."""
    return DEVICE.fullmatch(name) is not None
