# SPDX-License-Identifier: Apache-2.0
"""Messages arrive as they were sent, and nothing else is taken for one."""

import msgspec
import pytest

from cache.tiers.tier import Address
from engine_ext.wire.chunk_file import ChunkFileLabel
from engine_ext.wire.worker_messages import (
    Answer,
    CountBlocks,
    Drop,
    DropBlocks,
    Fetch,
    FindRecord,
    KeepRecord,
    ListRecords,
    Load,
    Read,
    ReleaseBlocks,
    StageBlocks,
    StopBlocks,
    Store,
    block_message,
    segment_message,
)

LABEL = ChunkFileLabel("engine", "0a", "", "0102", 0, 2)
OF_SEGMENTS = [
    Read(LABEL, [3, 4], 7),
    Store(LABEL, [3, 4], 7),
    Load(LABEL, [3, 4], 7, (1, 4), ("host", "file"), 0.5),
    Fetch(LABEL, [3, 4], 7, "http://replica", "engine-2", "secret", 2.0),
    Drop([Address("0a", 1, 2)]),
    KeepRecord(LABEL, b"\x00\xff"),
    FindRecord(LABEL),
    ListRecords("engine"),
]
OF_BLOCKS = [StageBlocks("a", "b", ["0c"]), ReleaseBlocks("a"), DropBlocks("b"), StopBlocks(), CountBlocks()]


def test_messages_and_answers_arrive_as_sent_and_others_are_refused():
    assert [segment_message(message.to_bytes()) for message in OF_SEGMENTS] == OF_SEGMENTS
    assert [block_message(message.to_bytes()) for message in OF_BLOCKS] == OF_BLOCKS
    answer = Answer("", "file", "fetched", 3, [("file", "hit")], {"file": 9}, 2, ["0a"], b"\xff")
    assert Answer.from_bytes(answer.to_bytes()) == answer
    wrong = msgspec.msgpack.encode({"type": "ListRecords", "fingerprint": 5})
    for message in [*(each.to_bytes() for each in OF_BLOCKS), wrong]:
        with pytest.raises(msgspec.ValidationError):
            segment_message(message)
