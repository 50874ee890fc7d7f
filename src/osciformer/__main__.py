"""`python -m osciformer`: the command line."""

import sys

from osciformer.cli import main

if __name__ == "__main__":
    sys.exit(main())
