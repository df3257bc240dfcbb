# SPDX-License-Identifier: Apache-2.0
"""Cache salts of ordinary prompts."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from engine_ext.wire.caller import CALLER, Caller
from tests.engine_ext.fake_llm import make_engine


async def salt(prompt: dict[str, Any], caller: Caller | None = None) -> str | None:
    """The salt with which the engine gets ``prompt``."""
    engine, llm = make_engine()
    seen: list[dict[str, Any]] = []

    async def generate(given: dict[str, Any], *_: Any, **__: Any) -> Any:
        seen.append(given)
        yield SimpleNamespace(outputs=[])

    llm.generate = generate
    token = CALLER.set(caller)
    try:
        outputs = engine.generate({"prompt_token_ids": [1], **prompt}, SamplingParams(max_tokens=1), "r")
    finally:
        CALLER.reset(token)
    async for _ in outputs:
        break
    return seen[0].get("cache_salt")


async def test_the_default_namespace_has_none() -> None:
    assert await salt({}) is None


@pytest.mark.parametrize("caller", [None, Caller("acme")])
async def test_a_client_cannot_choose_the_engines_salt(caller: Caller | None) -> None:
    """Its own salt separates its prompts, but equals neither a composition's nor a tenant's."""
    tenants = await salt({}, Caller("acme"))
    for own in ("mine", str(tenants)):
        assert await salt({"cache_salt": own}, caller) not in (None, own, tenants)
    assert await salt({"cache_salt": "mine"}, caller) == await salt({"cache_salt": "mine"}, caller)
    assert await salt({"cache_salt": "mine"}, caller) != await salt({"cache_salt": "other"}, caller)
