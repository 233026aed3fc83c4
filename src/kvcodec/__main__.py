"""``python -m kvcodec``: the command line."""

import sys

from kvcodec.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
