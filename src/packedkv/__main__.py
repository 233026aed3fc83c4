"""``python -m packedkv``: the command line."""

import sys

from packedkv.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
