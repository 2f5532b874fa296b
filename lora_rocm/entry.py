"""The program ``lora-rocm``: imports the commands, so that Ctrl+C meanwhile ends it like any command.

It imports nothing else, because Ctrl+C would show a traceback there. What remains is the start of Python itself.
"""

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
        if "--json" in sys.argv and sys.stdout is not None:
            sys.stdout.write(DOCUMENT)
        if sys.stderr is not None:
            sys.stderr.write("Stopped.\n")
        sys.exit(STOPPED)
