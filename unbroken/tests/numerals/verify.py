"""Prove the resume on your own code: a run killed and undisturbed, compared bit by bit."""

from unbroken.commands import run_command

if __name__ == "__main__":
    run_command("verify", "numerals")
