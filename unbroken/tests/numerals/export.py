"""Turn a checkpoint into ONNX, torch.export and safetensors files, checked on the test set."""

from unbroken.commands import run_command

if __name__ == "__main__":
    run_command("export", "numerals")
