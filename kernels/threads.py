# SPDX-License-Identifier: Apache-2.0
"""Torch's own threads for compiled functions.

vLLM binds each of torch's OpenMP threads to a core of its own. Any other thread of the process would share the core of
the thread that started it.
"""

import ctypes
from collections.abc import Callable
from typing import Any, Final

import torch

_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_PROCESS: Final[Any] = ctypes.CDLL(None)
"""Symbols of the process, among them those of the OpenMP library that torch has loaded.

``GOMP_parallel`` is GNU's entry to a parallel region; LLVM's and Intel's libraries have it too.
"""


def use_one_thread() -> None:
    """Makes the calling thread run its torch operations alone.

    In an operation of several threads, OpenMP would bind the calling thread to one core. ``torch.set_num_threads`` does
    nothing here: vLLM replaces it on CPUs.
    """
    torch._C.set_num_threads(1)


def in_torch_threads(compute: Callable[[int, int], None], count: int) -> None:
    """Calls ``compute(first, end)`` for parts of ``range(count)``, each in another of torch's threads.

    ``compute`` should spend its time without the GIL. Its first exception is raised. Without an OpenMP library it gets
    the whole range.
    """
    num_threads = min(torch.get_num_threads(), count) if hasattr(_PROCESS, "GOMP_parallel") else 1
    if num_threads <= 1:
        return compute(0, count)
    bounds = [count * number // num_threads for number in range(num_threads + 1)]
    errors: list[BaseException] = []
    done: list[int] = []

    def body(_: int | None) -> None:
        number = _PROCESS.omp_get_thread_num()
        try:
            compute(bounds[number], bounds[number + 1])
            done.append(number)
        except BaseException as error:
            errors.append(error)

    _PROCESS.GOMP_parallel(_Body(body), None, num_threads, 0)
    if errors:
        raise errors[0]
    for number in set(range(num_threads)).difference(done):  # OpenMP may give fewer threads than it is asked for
        compute(bounds[number], bounds[number + 1])
    return None
