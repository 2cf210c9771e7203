"""The program ``deltic``: ``python -m deltic``, and the script of that name.

The commands and words are those of the program that the C++ project builds; ``verify`` and
``bench`` take their quick forms unless ``--all`` says otherwise.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Sequence

from ._library import LIBRARY


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line, by default the process's, and returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if any("\0" in word for word in arguments):
        print("deltic: arguments: expected texts without zero bytes, got one", file=sys.stderr)
        return 2
    if not hasattr(LIBRARY, "deltic_torch_program"):
        print(
            "deltic: program: expected a package that was built where CLI11 and nlohmann-json are "
            "(libcli11-dev, nlohmann-json3-dev), got one without the program; deltic.show_config() "
            "and deltic.explain() are there",
            file=sys.stderr,
        )
        return 2
    # The number of a closed stdout may by now be that of a file of somebody else's.
    if sys.stdout is None or sys.stdout.closed:
        print("deltic: output: expected an open stdout, got a closed one", file=sys.stderr)
        return 1
    try:
        sys.stdout.flush()
    except OSError as error:
        print(f"deltic: output: writing to stdout failed: {error.strerror}", file=sys.stderr)
        return 1
    words = [os.fsencode(word) for word in ("deltic", *arguments)]
    program = LIBRARY.deltic_torch_program
    program.restype = ctypes.c_int32
    program.argtypes = [ctypes.c_int32, ctypes.POINTER(ctypes.c_char_p)]
    before = signal.getsignal(signal.SIGINT)
    try:
        return int(program(len(words), (ctypes.c_char_p * (len(words) + 1))(*words, None)))
    finally:
        # Ctrl-C ended the program; for a caller it is the interpreter's again.
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.exit(main())
