"""This machine's tables, such as devices, loaders, overhead. Without a name: all of them."""

from unbroken.commands import run_command

if __name__ == "__main__":
    run_command("benchmark", "numerals")
