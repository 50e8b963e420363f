"""Search hyperparameters here, without an account: trials of fit side by side (Optuna)."""

from unbroken.commands import run_command

if __name__ == "__main__":
    run_command("sweep", "numerals")
