# SPDX-License-Identifier: Apache-2.0
"""Strict types: a non-number is no number, a non-boolean no boolean (schemathesis found `{"ttl_s": true}`)."""

import pytest
from pydantic import ValidationError

from app.documents.cache_options import CacheField
from app.documents.rag_request import IngestRequest, RagChatRequest
from app.routes.cache import SleepRequest


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (IngestRequest, {"chunks": [], "ttl_s": True}),
        (IngestRequest, {"chunks": [], "pin": "yes"}),
        (SleepRequest, {"idle_s": True}),
        (CacheField, {"explain": 1}),
        (CacheField, {"recompute": False}),
        (CacheField, {"reread": True}),
        *((CacheField, {"sparse": {name: True}}) for name in ("budget_tokens", "budget_share", "mass")),
        (RagChatRequest, {"chunks": [], "question": "?", "stream": "on"}),
    ],
)
def test_other_types_are_refused(model, fields):
    with pytest.raises(ValidationError):
        model(**fields)
    # Whole numbers are numbers.
    assert IngestRequest(chunks=[], ttl_s=5).ttl_s == 5
    assert SleepRequest(idle_s=0).idle_s == 0
    assert CacheField(recompute=1, sparse={"budget_share": 1, "mass": 1}).recompute == 1
