# SPDX-License-Identifier: Apache-2.0
"""The process of a trial: ``tessera serve`` without its HTTP server.

Imports are inside functions: the engine's processes import this module again before vLLM is set up in them.
"""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import Namespace

    from app.settings import Settings


def main() -> None:
    """Writes the result as JSON to the first argument. The other arguments are those of ``tessera serve``."""
    from app.arguments import parse
    from app.models.default_model import present_model
    from app.models.packaged_models import local_model
    from app.server import abandon_start
    from app.settings import load_settings
    from machine.process_watch import end_with_starter

    end_with_starter()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, abandon_start)
    result, *arguments = sys.argv[1:]
    args = parse(arguments)
    args.model = local_model(args.model_tag) if args.model_tag else present_model()
    # Not in the registry, where requests would find it; without tiers, whose files it must not touch; and a reason
    # against the cache is a finding, not the end.
    apart = {"registry": None, "chunk_cache_tiers": None, "chunk_cache": "on"}
    found = asyncio.run(_try(args, load_settings(args).model_copy(update=apart)))
    Path(result).write_text(json.dumps(found))


async def _try(args: "Namespace", settings: "Settings") -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from app.server import prepare, started_app
    from engine_ext.start.refusals import refusals

    prepare(args, settings)
    async with started_app(args, settings) as (_, engine):
        if engine.cache.reason is not None:
            return {"reason": engine.cache.reason}
        (description, *_) = await engine.llm.collective_rpc("chunk_cache_describe")
        return {
            "reason": None,
            "tokens": engine.cache.num_tokens,
            "strategy": engine.strategy.described(),
            "is_known": engine.strategy.is_known,
            "placement": engine.cache.placement,
            "decode_budget": engine.decode_budget,
            "refusals": await refusals(engine, AsyncEngineArgs.from_cli_args(args), settings.chunk_cache_placement),
            **description,
        }


if __name__ == "__main__":
    main()
