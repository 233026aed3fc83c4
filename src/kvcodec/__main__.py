"""``python -m kvcodec``."""

import sys

from kvcodec.cli import main

if __name__ == "__main__":
    sys.exit(main())
