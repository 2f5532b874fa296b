"""The program ``lora-rocm``: imports the commands, so that Ctrl+C meanwhile ends it like any command.

It imports nothing that Python has not loaded, because Ctrl+C would show a traceback there. What remains is the start of
Python itself.
"""

import os
import sys

STOPPED = 130
DOCUMENT = (
    '{"error": {"code": "stopped", "what": "Stopped.", "where": "", "fix": "", "exit_code": 130, "problems": []}}\n'
)
"""The document of ``--json``, as ``Output`` prints it."""


def main() -> None:
    """Entry point of ``lora-rocm``."""
    try:
        from lora_rocm.cli import main as run

        run()
    except KeyboardInterrupt:
        for stream, text in ((sys.stdout, DOCUMENT if "--json" in sys.argv else ""), (sys.stderr, "Stopped.\n")):
            try:
                if stream is not None:
                    stream.write(text)
                    stream.flush()
            except OSError:  # the exit code remains; Python would print a traceback about unwritten text
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # writes: the system's null device
        sys.exit(STOPPED)
