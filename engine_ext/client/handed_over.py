# SPDX-License-Identifier: Apache-2.0
"""Requests whose prompt one engine computes and another one answers."""

import logging
from collections.abc import Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

from pydantic import ValidationError
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from cache.metrics import ChunkCacheMetrics
from cache.report import Handed, Report
from engine_ext.client.call import EngineCall, KVForm, is_error, transfer_params
from engine_ext.client.request import Outputs
from engine_ext.wire.handover import HANDOVER_KEY, Handover, is_given_away, is_taken_over

logger = logging.getLogger(__name__)

_REPORT_KEY: Final = "cache"


class HandoverError(Exception):
    """Another engine's blocks can't be used; the message says why. The client got no output yet."""

    def __init__(self, outcome: Literal["refused", "failed"], message: str) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.handed = Handed(outcome=outcome, why=message)


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The KV that another engine has for a request: its record, and its report if the request has chunks.

    ``record`` is ``None`` if it is of an unknown version. ``address`` has the connector's own parameters;
    ``is_readable``: there is such a connector.
    """

    record: Handover | None
    report: Report | None
    address: Mapping[str, Any]
    is_readable: bool

    @classmethod
    def of(cls, params: SamplingParams, *, is_readable: bool) -> Self | None:
        """The KV that ``params`` name, if any; raises ``VLLMValidationError`` for a malformed record."""
        given = transfer_params(params)
        if not is_taken_over(given):
            return None
        address = {name: value for name, value in given.items() if name not in (HANDOVER_KEY, _REPORT_KEY)}
        try:
            record, report = Handover.from_params(given), given.get(_REPORT_KEY)
            other = Report.model_validate(report) if record is not None and report is not None else None
            return cls(record, other, address, is_readable)
        except ValidationError as error:
            message = "the report beside a handover is malformed"
            raise VLLMValidationError(message, parameter="kv_transfer_params") from error
        except ValueError as error:
            raise VLLMValidationError(str(error), parameter="kv_transfer_params") from error

    @property
    def is_chunked(self) -> bool:
        """Whether the KV was composed from chunks."""
        return self.record is not None and self.record.mode == "chunked"

    async def outputs(self, call: EngineCall, form: KVForm, metrics: ChunkCacheMetrics) -> Outputs:
        """The answer over the KV, if it has this form; raises :class:`HandoverError`."""
        if (why := self._difference(call, _record(form))) is not None:
            raise await self.refused(call, why, metrics)
        has_output = False
        async with aclosing(call.generate(form, self.address)) as outputs:
            async for output in outputs:
                if not has_output and is_error(output):
                    raise _noted(HandoverError("failed", "the other engine's blocks could not be read"), call, metrics)
                has_output = True
                yield output
        metrics.handovers["taken"] += 1

    async def refused(self, call: EngineCall, why: str, metrics: ChunkCacheMetrics) -> HandoverError:
        """Releases the other engine's blocks; returns the error that says why they can't be used."""
        await call.release(self.address)
        return _noted(HandoverError("refused", why), call, metrics)

    def _difference(self, call: EngineCall, own: Handover) -> str | None:
        """The reason why the KV is not what this engine would compute."""
        record = self.record
        if record is None:
            return "its record is of another version"
        checks = [
            (not self.is_readable, "no connector here reads other engines' blocks"),
            (call.num_answers != 1, "several answers"),
            (record.mode != own.mode, f"computed in mode {record.mode}, not {own.mode}"),
            (record.placement != own.placement, f"placement {record.placement}, not {own.placement}"),
            (record.digest != own.digest, "of another prompt, layout or model, or in another memory order"),
        ]
        return next((why for holds, why in checks if holds), None)


def _noted(error: HandoverError, call: EngineCall, metrics: ChunkCacheMetrics) -> HandoverError:
    """The error, counted and logged."""
    outcome = error.outcome
    metrics.handovers[outcome] += 1
    logger.warning("request %s: handover %s: %s; computing", call.request_id, outcome, error)
    return error


def given_away(output: RequestOutput, form: KVForm, call: EngineCall) -> RequestOutput:
    """The output; the last one has the record of its KV if another engine will read the blocks."""
    if output.finished and output.kv_transfer_params and is_given_away(transfer_params(call.params)):
        output.kv_transfer_params = {**output.kv_transfer_params, **_record(form).to_params()}
    return output


def _record(form: KVForm) -> Handover:
    """The form's record for another engine."""
    token_ids = form.prompt["prompt_token_ids"]
    return Handover.of(form.mode, form.placement, form.layout_salt, form.block_order, token_ids)


async def ordinary_outputs(
    call: EngineCall, form: KVForm, handover: HandedOver | None, metrics: ChunkCacheMetrics
) -> Outputs:
    """Outputs of a request without chunks that goes to, or comes from, another engine."""
    if handover is not None:
        with suppress(HandoverError):
            async with aclosing(handover.outputs(call, form, metrics)) as outputs:
                async for output in outputs:
                    yield output
            return
    async with aclosing(call.generate(form)) as outputs:
        async for output in outputs:
            yield given_away(output, form, call)
