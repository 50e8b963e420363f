"""The runs of a folder: what each has reached, how they differ, and their means over seeds."""


def main(argv: list[str]) -> int:  # moved: delete this function after the merge
    """``project.runs.__main__.main``."""
    from project.runs.__main__ import main as command

    return command(argv)
