"""Find a learning rate or a batch size for this machine, by short trainings that leave no run."""

from unbroken.commands import run_command

if __name__ == "__main__":
    run_command("tune", "numerals")
