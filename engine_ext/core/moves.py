# SPDX-License-Identifier: Apache-2.0
"""Order between the engine's copies on a device and those of other threads."""

from typing import Any

import torch


class Moves:
    """The engine's loads and saves that are queued on a stream; on CPUs there are none."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._queued = None if self._module is None else self._module.Event()

    def queued(self) -> None:
        """Marks what the calling thread, the engine's, has queued so far."""
        if self._queued is not None:
            self._queued.record()

    def wait(self) -> None:
        """Waits until everything marked is done."""
        if self._queued is not None:
            self._queued.synchronize()

    def finish(self) -> None:
        """Waits for the calling thread's own copies, not for the engine's."""
        if self._module is not None:
            self._module.current_stream().synchronize()
