"""How a template's command starts: ``python -m NAME.tune`` is two lines in NAME/tune.py."""

from functools import partial
from importlib import import_module

from unbroken.cli.start import prepare_process, quick_imports, run


def run_command(name: str, package: str) -> None:
    """Run a command of a package, and end the process with its exit code.

    Args:
        name: The command, such as ``tune``.
        package: The package whose command it is. Its module ``fit`` holds the ``job``.
    """
    prepare_process("__main__")  # threads and signals, before torch is imported
    with quick_imports():
        command = import_module(f"unbroken.commands.{name}")
    run(partial(command.main, package))
