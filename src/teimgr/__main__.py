"""`python -m teimgr` is `teimgr`."""

import sys

from teimgr.cli import main

if __name__ == "__main__":
    sys.exit(main())
