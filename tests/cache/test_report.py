# SPDX-License-Identifier: Apache-2.0
"""The report's JSON form."""

import json

import pytest

from cache.lease import ChunkStatus
from cache.positions.layout import Chunk, PositionReindexer, PositionStrategy, pack
from cache.report import Report, ReportedTokens, Segment, explain_segments
from tests.cache.helpers import make_prompt


def test_to_dict_has_every_field_and_is_json():
    chunks = [Chunk(pack((1,) * 10), "d1"), Chunk(pack((1,) * 8), None, 1, (2, 3))]
    report = Report.begun(PositionStrategy.SHARED, "system", 30, chunks)
    report.mode = "chunked"
    report.tokens = ReportedTokens(prompt=30, reused=18, computed=12, fill_computed=15)
    report.chunks[0].key, report.chunks[0].status = "00ff", ChunkStatus.FILLED
    report.timings_ms = {"plan": 0.12345, "fill": 2.0}
    assert json.loads(json.dumps(report.to_dict())) == {
        "mode": "chunked",
        "reason": None,
        "position_strategy": "shared",
        "scope": "system",
        "tokens": {"prompt": 30, "reused": 18, "computed": 12, "fill_computed": 15},
        "chunks": [
            {"index": 0, "id": "d1", "key": "00ff", "tokens": 10, "status": "filled"},
            {"index": 1, "id": None, "part": {"number": 2, "of": 3}, "key": None, "tokens": 8, "status": None},
        ],
        "timings_ms": {"plan": 0.123, "fill": 2.0},
    }


def test_a_new_report_is_of_full_attention_with_nothing_reused():
    report = Report.begun(PositionStrategy.OFFSET, "system", 5)
    told = report.to_dict()
    assert (told["mode"], told["reason"], told["position_strategy"]) == ("full", None, "offset")
    assert told["tokens"] == {"prompt": 5, "reused": 0, "computed": 0, "fill_computed": 0}
    assert "segments" not in told
    report.segments = []
    assert report.to_dict()["segments"] == []


@pytest.mark.parametrize(
    ("strategy", "positions"),
    [(PositionStrategy.SHARED, [0, 2, 2, 5]), (PositionStrategy.OFFSET, [0, 2, 4, 7]), (None, [0, 2, 4, 7])],
)
def test_segments_are_explained_with_their_logical_positions(strategy, positions):
    prompt = make_prompt((4, 5), (6, 7, 8), system=(1, 2))
    layout = strategy and PositionReindexer().layout(prompt, strategy)
    kinds, ids = ["system", "chunk", "chunk", "question"], [(1, 2), (4, 5), (6, 7, 8), (9, 9)]
    assert explain_segments(prompt, layout) == [
        Segment(kind=kind, token_ids=token_ids, position=position)
        for kind, token_ids, position in zip(kinds, ids, positions, strict=True)
    ]
    empty, *_ = explain_segments(make_prompt((4,), system=()), None)
    assert empty == Segment(kind="system", token_ids=(), position=0)
