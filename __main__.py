"""The program `bsearch`, also as `python -m bsearch`."""

import atexit
import os
import signal
import sys


def main() -> None:
    """Run the command line. Ctrl-C while its modules are still being read ends it without a traceback."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .search.report.stdio.streams import make_steady, not_printed

    make_steady()
    from .commands.group import main as command_line

    signal.signal(signal.SIGINT, before)
    try:
        command_line(prog_name="bsearch")
    except SystemExit as end:
        if why := not_printed():
            print(f"{why}. Everything else was done.", file=sys.stderr)
            end.code = end.code or 1
        if not sys.modules.keys() & {"ray", "mcp"} or not isinstance(end.code, int | None):
            raise
        # All is written and Ray is disconnected, but its libraries may crash while the interpreter takes them apart. That would
        # also wait for the thread in which the MCP SDK reads stdin until its other end is closed.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code or 0)


if __name__ == "__main__":
    main()
