# SPDX-License-Identifier: Apache-2.0
"""The small server as a process: ``python -m tests.measuring.fake_process serve MODEL … --port PORT``.

``--die`` ends it before it listens, ``--fail`` amid the first answer; ``--hang`` keeps it from ever being ready.
"""

import os
import sys
import time

import uvicorn

from tests.measuring.fake_server import FakeServer, make_app


async def die() -> None:
    os._exit(3)


if __name__ == "__main__":
    print(f"pid {os.getpid()}, model {sys.argv[2]}, flags {sys.argv[3:]}", flush=True)
    if "--die" in sys.argv:
        sys.exit("error: out of luck")
    if "--hang" in sys.argv:
        time.sleep(60)
    fake = FakeServer(before=die if "--fail" in sys.argv else None)
    uvicorn.run(make_app(fake), port=int(sys.argv[sys.argv.index("--port") + 1]), log_level="critical")
