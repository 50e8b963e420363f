"""Build a saved W&B workspace for this project's runs: Training, Throughput, Memory, Mistakes."""

from unbroken.commands import run_command

if __name__ == "__main__":
    run_command("dashboard", "numerals")
