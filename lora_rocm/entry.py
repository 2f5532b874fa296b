"""The program ``lora-rocm``: imports the commands, so that Ctrl+C meanwhile ends it like any command.

It imports nothing else, because Ctrl+C would show a traceback there.
"""

import sys

STOPPED = 130


def main() -> None:
    """Entry point of ``lora-rocm``."""
    try:
        from lora_rocm.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("Stopped.\n")
        sys.exit(STOPPED)
