"""Labelling files: which files, how each becomes an input, and what the answers are called."""


def main(argv: list[str]) -> int:  # moved: delete this function after the merge
    """``project.predict.__main__.main``."""
    from project.predict.__main__ import main as command

    return command(argv)
