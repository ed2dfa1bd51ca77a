"""`python -m teimgr.bench_client`."""

import sys

from teimgr.bench_client.command import main

sys.exit(main())
