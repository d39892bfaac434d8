"""The command `python -m lab`."""

from lab.command import reproduce

if __name__ == "__main__":
    reproduce(prog_name="python -m lab")
