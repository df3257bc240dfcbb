# SPDX-License-Identifier: Apache-2.0
"""The files that one cached request enters on the engine's side, with a fake engine."""

import re
import sys
from types import FrameType
from typing import Any

from cache.lease import ChunkStatus
from cache.positions.layout import ChunkedPrompt
from machine.server_process import ROOT
from tests.engine_ext.fake_llm import ask, chunk, make_engine

MOST_FILES = 16


async def test_a_cached_request_enters_the_files_that_the_docs_name() -> None:
    engine, _ = make_engine()
    prompt = ChunkedPrompt((1, 2), (chunk(100, 20), chunk(300, 9)), (7, 8))
    for _ in range(2):
        await ask(engine, prompt)
    entered: dict[str, None] = {}

    def profile(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith((f"{ROOT}/cache/", f"{ROOT}/engine_ext/")):
            entered[file.removeprefix(f"{ROOT}/")] = None

    sys.setprofile(profile)
    try:
        report = await ask(engine, prompt)
    finally:
        sys.setprofile(None)
    assert [each.status for each in report.chunks] == [ChunkStatus.HIT] * 2
    section = (ROOT / "docs/request-path.md").read_text().partition("file by file\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([\w/]+\.py)`", section)) - {"engine_ext/core/stats.py"}  # vLLM's own processes fill it
    assert set(entered) == named
    assert len(entered) <= MOST_FILES
