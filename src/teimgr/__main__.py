"""`python -m teimgr` is `teimgr`."""

import sys

from teimgr.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
