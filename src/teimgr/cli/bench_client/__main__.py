"""`python -m teimgr.cli.bench_client`."""

import sys

from teimgr.cli.bench_client.command import main

sys.exit(main())
