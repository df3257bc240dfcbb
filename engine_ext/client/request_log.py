# SPDX-License-Identifier: Apache-2.0
"""One log record per finished request over chunks."""

import logging
from collections import Counter
from typing import Any

from cache.report import Report

logger = logging.getLogger(__name__)


def summary(report: Report) -> dict[str, Any]:
    """The report without its chunks, which are counted by status."""
    shown = report.to_dict()
    statuses = Counter(str(chunk.status) for chunk in report.chunks if chunk.status is not None)
    return {
        "mode": shown["mode"],
        "reason": shown["reason"],
        "chunks": {"total": len(report.chunks), **statuses},
        "tokens": shown["tokens"],
        "timings_ms": shown["timings_ms"],
    }


def log_finished(request_id: str, report: Report) -> None:
    """Logs a readable line at level INFO, with its parts as fields of the record."""
    if not logger.isEnabledFor(logging.INFO):
        return
    fields = summary(report)
    logger.info("request %s: %s", request_id, _line(fields), extra={"request_id": request_id, **fields})


def _line(fields: dict[str, Any]) -> str:
    mode = fields["mode"] if fields["reason"] is None else f"{fields['mode']} ({fields['reason']})"
    chunks = ", ".join(f"{count} {name}" for name, count in fields["chunks"].items() if name != "total")
    tokens, timings = fields["tokens"], fields["timings_ms"]
    return "; ".join(
        [
            f"{mode}, {fields['chunks']['total']} chunks" + (f": {chunks}" if chunks else ""),
            f"{tokens['reused']} of {tokens['prompt']} tokens reused",
            ", ".join(f"{name.replace('_', ' ')} {value:.1f} ms" for name, value in timings.items()),
        ]
    )
