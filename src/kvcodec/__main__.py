"""``python -m kvcodec``: the command line of ``kvcodec_lab``."""

import sys

from kvcodec_lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
