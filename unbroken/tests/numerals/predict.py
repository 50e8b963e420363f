"""Label image files of any size, format and colours, or what a predict_dataloader gives."""

from unbroken.commands import run_command

if __name__ == "__main__":
    run_command("predict", "numerals")
