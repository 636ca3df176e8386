"""The program `bsearch`, also as `python -m bsearch`."""

import signal


def main() -> None:
    """Run the command line. Ctrl-C while its modules are still being read ends it without a traceback."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .cli import main as command_line

    signal.signal(signal.SIGINT, before)
    command_line(prog_name="bsearch")


if __name__ == "__main__":
    main()
