# SPDX-License-Identifier: Apache-2.0
"""Parameters of ordinary prompts that clients can't choose."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from engine_ext.client.request import CALLER, IS_PEER, Caller
from engine_ext.wire.plan import TransferPlan
from engine_ext.wire.prefix import PrefixTag
from tests.engine_ext.fake_llm import make_engine
from tests.support.variables import having


async def salt(prompt: dict[str, Any], caller: Caller | None = None) -> str | None:
    """The salt with which the engine gets ``prompt``."""
    engine, llm = make_engine()
    seen: list[dict[str, Any]] = []

    async def generate(given: dict[str, Any], *_: Any, **__: Any) -> Any:
        seen.append(given)
        yield SimpleNamespace(outputs=[])

    llm.generate = generate
    with having(CALLER, caller):
        outputs = engine.generate({"prompt_token_ids": [1], **prompt}, SamplingParams(max_tokens=1), "r")
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


@pytest.mark.parametrize("reserved", [TransferPlan().to_params(), PrefixTag.of("another namespace").to_params()])
def test_not_even_peers_may_name_pages_or_prefixes(reserved: dict[str, Any]) -> None:
    engine, _ = make_engine()
    params = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": reserved})
    with having(IS_PEER, True), pytest.raises(VLLMValidationError, match="reserved"):
        engine.generate({"prompt_token_ids": [1]}, params, "forged")


async def test_the_callers_own_parameters_stay_as_they_are() -> None:
    """A call with several prompts may pass the same object for each."""
    engine, _ = make_engine()
    engine.cache.prefixes = SimpleNamespace(params=lambda *_: PrefixTag.of("mine").to_params())
    params = SamplingParams(max_tokens=1)
    for number in range(2):
        async for _ in engine.generate({"prompt_token_ids": [1]}, params, f"r{number}"):
            pass
    assert params.extra_args is None
