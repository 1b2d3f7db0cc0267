"""`python -m query_mutator` is `qm`."""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while modules load ends the process without a traceback

from query_mutator.commands.main import run

if __name__ == "__main__":
    run()
