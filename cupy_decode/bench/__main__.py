"""``python -m cupy_decode.bench`` is ``python -m cupy_decode bench``."""

import sys

from cupy_decode import __main__ as commands


def main() -> None:
    """Run the command on the arguments of the process, and exit."""
    sys.exit(commands.main(["bench", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
