"""List, compare and average the runs of checkpoints/."""

from unbroken.commands import run_command

if __name__ == "__main__":
    run_command("runs", "numerals")
