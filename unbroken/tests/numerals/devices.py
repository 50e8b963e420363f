"""What this machine has, and the flags of fit that suit it."""

from unbroken.commands import run_command

if __name__ == "__main__":
    run_command("devices", "numerals")
