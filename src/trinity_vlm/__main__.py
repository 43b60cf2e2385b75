"""``python -m trinity_vlm``: the command line, as torchrun starts it too: ``torchrun ... -m trinity_vlm train ...``."""

from trinity_vlm.cli.main import run

if __name__ == "__main__":
    run()
