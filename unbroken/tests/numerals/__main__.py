"""The commands, one line each."""

from pathlib import Path

from unbroken.commands import print_commands

if __name__ == "__main__":
    print_commands(Path(__file__).parent)
