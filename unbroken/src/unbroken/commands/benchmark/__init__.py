"""What this machine does in a second, and what a run costs: tables of real runs and of loops
written by hand.
"""

from unbroken.commands.benchmark.command import main as main
