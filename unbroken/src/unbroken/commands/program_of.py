"""The program that a command belongs to."""

from importlib import import_module

from unbroken.cli.program import Program
from unbroken.errors import UserError


def program_of(package: str) -> Program:
    """The ``job`` in the module ``fit`` of a package. Torch is imported with it.

    Raises:
        UserError: There is none.
    """
    job = getattr(import_module(f"{package}.fit"), "job", None)
    if not isinstance(job, Program):
        raise UserError(f"{package}/fit.py must hold `job = Job(...)`, see unbroken.run.Job.")
    return job
