"""Give this package another name, or take a later version of the library."""

from unbroken.commands import run_command

if __name__ == "__main__":
    run_command("rename", "numerals")
