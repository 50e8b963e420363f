"""What a program calls above its imports: see :func:`prepare_process`."""

from unbroken.cli.start import prepare_process as prepare_process
