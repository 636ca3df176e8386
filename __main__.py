"""The program `bsearch`, also as `python -m bsearch`."""

import atexit
import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    """Run the command line. Ctrl-C while its modules are still being read ends it without a traceback."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .cli import main as command_line

    signal.signal(signal.SIGINT, before)
    try:
        command_line(prog_name="bsearch")
    except SystemExit as end:
        if "ray" not in sys.modules or not isinstance(end.code, int | None):
            raise
        # All is written and Ray is disconnected, but its libraries may crash while the interpreter takes them apart.
        atexit._run_exitfuncs()
        with suppress(OSError, ValueError):  # the reader is gone
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(end.code or 0)


if __name__ == "__main__":
    main()
