"""A local hyperparameter search: trials of ``fit`` beside each other, the hopeless ones stopped
early.
"""

from unbroken.commands.sweep.command import main as main
