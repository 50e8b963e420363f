"""Exporting: what a module's forward is traced with, the files, and their comparison with it."""


def main(argv: list[str]) -> int:  # moved: delete this function after the merge
    """``project.export.__main__.main``."""
    from project.export.__main__ import main as command

    return command(argv)
