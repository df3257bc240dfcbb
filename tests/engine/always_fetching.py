# SPDX-License-Identifier: Apache-2.0
"""`tessera` without cost measurements: it always fetches, even where computing would be faster."""

import sys

from app.cli import main
from cache.costs import Pace

if __name__ == "__main__":
    Pace.seconds = lambda self, amount: None
    sys.exit(main())
