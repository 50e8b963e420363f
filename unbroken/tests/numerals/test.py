"""A checkpoint's metrics on the test set. Needs only the checkpoint."""

from unbroken.commands import run_command

if __name__ == "__main__":
    run_command("test", "numerals")
