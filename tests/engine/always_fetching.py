# SPDX-License-Identifier: Apache-2.0
"""`tessera` that has measured nothing yet: it fetches, also where a busy machine would compute the chunk sooner."""

import sys

from app.cli import main
from cache.costs import Pace

if __name__ == "__main__":
    Pace.seconds = lambda self, amount: None
    sys.exit(main())
