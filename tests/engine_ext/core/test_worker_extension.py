# SPDX-License-Identifier: Apache-2.0
"""The worker extension beside one of the user's."""

import pytest
from vllm.utils.import_utils import resolve_obj_by_qualname

from engine_ext.core.worker_extension import ChunkCacheWorkerExtension
from engine_ext.start.startup import ChunkCacheOptions, beside


class Theirs:
    def hello(self) -> str:
        return "hello"


OURS = ChunkCacheOptions().worker_extension_class


def test_a_worker_finds_both_as_one_class() -> None:
    found = resolve_obj_by_qualname(beside(OURS, f"{__name__}.Theirs"))
    assert found.__mro__[1:3] == (ChunkCacheWorkerExtension, Theirs)
    assert resolve_obj_by_qualname(beside(OURS, "")) is ChunkCacheWorkerExtension


@pytest.mark.parametrize(("path", "message"), [("no.Class", "No module named 'no'"), (f"{__name__}.No", "'No'")])
def test_a_class_that_is_not_there_is_named(path: str, message: str) -> None:
    with pytest.raises((ImportError, AttributeError), match=message):
        resolve_obj_by_qualname(beside(OURS, path))
