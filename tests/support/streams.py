# SPDX-License-Identifier: Apache-2.0
"""Devices whose streams run later, in any order that streams and events allow, as CUDA's do.

As in PyTorch, a thread uses the first device and that device's default stream until it is told otherwise, an operator
is queued on the current stream of its tensors' device whatever device the thread uses, and a copy to or from the host
waits for its stream unless it is told not to, but not for the kernel that scatters what it has sent.
"""

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from kernels.paged import KVCopier, LayerKV
from kernels.reference import ReferenceCopier

DEVICE = torch.device("cuda", 1)
"""A worker's device that is not the first."""


class Task:
    """Work on a stream."""

    def __init__(self, run: Callable[[], Any], needs: tuple["Task", ...]) -> None:
        self.run = run
        self.needs = needs
        self.is_done = False


class Stream:
    """A queue of tasks of one device, which run in order."""

    def __init__(self, machine: "Machine", device: torch.device) -> None:
        self.machine = machine
        self.device = device
        self.tasks = deque[Task]()
        self.last: Task | None = None
        machine.streams.append(self)

    def queue(self, run: Callable[[], Any], *needs: Task) -> Task:
        """Runs later, behind everything queued so far and ``needs``."""
        self.last = Task(run, needs)
        self.tasks.append(self.last)
        self.machine.pass_time()
        return self.last

    def wait_event(self, event: "Event") -> None:
        if event.recorded is not None:
            self.queue(lambda: None, event.recorded)

    def synchronize(self) -> None:
        self.machine.use(self.device)
        self.machine.num_waits += 1
        self.machine.pass_time()
        if self.last is not None:
            self.machine.finish(self, self.last)


class Event:
    """A mark in a stream: it is reached once everything queued before the last :meth:`record` is done."""

    def __init__(self, machine: "Machine") -> None:
        self._machine = machine
        self._stream: Stream | None = None
        self.recorded: Task | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or self._machine.current_stream()
        self.recorded = self._stream.queue(lambda: None)

    def synchronize(self) -> None:
        self._machine.use(self._machine.current_device())
        self._machine.num_waits += 1
        self._machine.pass_time()
        if self._stream is not None and self.recorded is not None:
            self._machine.finish(self._stream, self.recorded)

    def query(self) -> bool:
        return self.recorded is None or self.recorded.is_done


class Machine:
    """A module of devices (:func:`torch.get_device_module`). ``source`` decides what runs when."""

    def __init__(self, source: random.Random) -> None:
        self._source = source
        self._of_thread = threading.local()
        self._defaults: dict[torch.device, Stream] = {}
        self.streams: list[Stream] = []
        self.used: set[torch.device] = set()
        """Devices on which there is a context: half a gigabyte each."""
        self.num_waits = 0
        """How often a thread has waited for a device."""
        self.meanwhile: Callable[[], None] = lambda: None
        """Called where another thread may run."""

    def Event(self) -> Event:  # noqa: N802 – PyTorch's name
        return Event(self)

    def Stream(self, device: torch.device | None = None) -> Stream:  # noqa: N802
        return Stream(self, device or self.current_device())

    def set_device(self, device: torch.device) -> None:
        self._of_thread.device = device
        self.use(device)

    def current_device(self) -> torch.device:
        device: torch.device = getattr(self._of_thread, "device", torch.device("cuda", 0))
        return device

    def set_stream(self, stream: Stream) -> None:
        self._streams()[stream.device] = stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream(stream.device)
        self.set_stream(stream)
        yield
        self.set_stream(before)

    def current_stream(self, device: torch.device | None = None) -> Stream:
        device = device or self.current_device()
        self.use(device)
        if device not in self._defaults:
            self._defaults[device] = Stream(self, device)
        return self._streams().get(device, self._defaults[device])

    def use(self, device: torch.device) -> None:
        """Makes a context on a device."""
        self.used.add(device)

    def pass_time(self) -> None:
        """Some tasks run, or none, and perhaps another thread."""
        self.meanwhile()
        for _ in range(self._source.choice((0, 0, 1, 5))):
            if not (ready := [each for each in self.streams if each.tasks and _is_ready(each.tasks[0])]):
                return
            _run_first(self._source.choice(ready))

    def finish(self, stream: Stream, task: Task) -> None:
        """Runs what ``task`` depends on, and the task."""
        while not task.is_done:
            for need in stream.tasks[0].needs:
                if not need.is_done:
                    self.finish(next(each for each in self.streams if need in each.tasks), need)
            _run_first(stream)

    def finish_all(self) -> None:
        """Runs everything."""
        for stream in self.streams:
            if stream.last is not None:
                self.finish(stream, stream.last)

    def tensor(self, memory: Tensor, device: torch.device = DEVICE) -> "DeviceTensor":
        """A tensor of a device, whose memory is ``memory``."""
        return DeviceTensor(memory, self, device)

    def on_device(self, layer: LayerKV) -> LayerKV:
        """The layer with pools that are the device's tensors."""
        layer = _in_memory(layer)
        return replace(layer, key_pool=self.tensor(layer.key_pool), value_pool=self.tensor(layer.value_pool))

    def _streams(self) -> dict[torch.device, Stream]:
        if not hasattr(self._of_thread, "streams"):
            self._of_thread.streams = {}
        streams: dict[torch.device, Stream] = self._of_thread.streams
        return streams


def _is_ready(task: Task) -> bool:
    return all(need.is_done for need in task.needs)


def _run_first(stream: Stream) -> None:
    task = stream.tasks.popleft()
    task.run()
    task.is_done = True


class QueuedCopier(KVCopier):
    """Queues its copies on the calling thread's stream."""

    def __init__(self, machine: Machine, layers: Sequence[LayerKV]) -> None:
        self._machine = machine
        self._copier = ReferenceCopier([_in_memory(each) for each in layers])
        super().__init__([machine.on_device(each) for each in layers])

    def _save(self, slots: Tensor, rows: Tensor) -> None:
        self._machine.current_stream(DEVICE).queue(lambda: self._copier.save(slots, rows))

    def _load(self, slots: Tensor, rows: Tensor, deltas: Tensor) -> None:
        self._machine.current_stream(DEVICE).queue(lambda: self._copier.load(slots, rows, deltas))


def _in_memory(layer: LayerKV) -> LayerKV:
    key_pool, value_pool = (getattr(pool, "memory", pool) for pool in (layer.key_pool, layer.value_pool))
    return replace(layer, key_pool=key_pool, value_pool=value_pool)


class DeviceTensor(Tensor):
    """Views are made at once; whatever reads or writes ``memory`` is queued."""

    memory: Tensor
    machine: Machine
    place: torch.device

    @staticmethod
    def __new__(cls, memory: Tensor, machine: Machine, device: torch.device) -> "DeviceTensor":
        made: DeviceTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, memory.shape, strides=memory.stride(), dtype=memory.dtype, device="cpu"
        )
        made.memory, made.machine, made.place = memory, machine, device
        return made

    def __init__(self, memory: Tensor, machine: Machine, device: torch.device) -> None:
        pass

    @property
    def device(self) -> torch.device:
        """The device, of which PyTorch itself would know that it isn't there."""
        return self.place

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = next(each for each in tree_flatten((args, kwargs))[0] if isinstance(each, DeviceTensor))
        machine, device = first.machine, first.device
        arguments, options = tree_map(lambda each: getattr(each, "memory", each), (args, kwargs))
        if all(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns):
            return tree_map(lambda view: cls(view, machine, device), func(*arguments, **options))
        stream = machine.current_stream(device)
        if func._schema.is_mutable:
            returned = args[0]
            is_copy = func is torch.ops.aten.copy_.default
            is_awaited = is_copy and not (
                all(isinstance(each, DeviceTensor) for each in args[:2]) or options.get("non_blocking") or any(args[2:])
            )
            if is_awaited and isinstance(returned, DeviceTensor) and not returned.memory.is_contiguous():
                stream.synchronize()  # it is sent in one piece, and scattered behind that
                is_awaited = False
            stream.queue(lambda: func(*arguments, **options))
        else:
            target = options.get("device")
            is_awaited = target is not None and target.type == "cpu" and not options.pop("non_blocking", False)
            options.pop("device", None)
            result = func(*arguments, **options)
            result.fill_(float("nan") if result.is_floating_point() else 0)  # until it has run
            if func is not torch.ops.aten.new_empty.default:
                stream.queue(lambda: result.copy_(func(*arguments, **options)))
            returned = result if is_awaited else cls(result, machine, device)
        if is_awaited:
            stream.synchronize()
        return returned


def in_thread(call: Callable[[], Any]) -> Any:
    """The call's result, from a thread of its own."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]
