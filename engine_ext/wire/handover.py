# SPDX-License-Identifier: Apache-2.0
"""The record of a request's KV on its way from one engine to another.

A KV connector moves blocks and knows nothing of chunks. The engine that takes them must know what they hold: KV
composed from chunks must never be found by requests in full attention.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, Literal, Self, get_args

from cache.positions.layout import PlacementName, pack

HANDOVER_KEY: Final = "tessera_handover"
"""Key of a :class:`Handover` in ``kv_transfer_params``."""
VERSION: Final = 1

Mode = Literal["chunked", "full"]


@dataclass(frozen=True, slots=True)
class Handover:
    """The content of handed-over blocks; equal if the blocks are.

    ``digest`` covers the prompt's tokens, the model, namespace and layout of their KV, and the memory order of blocks.
    """

    mode: Mode
    placement: PlacementName
    digest: str

    @classmethod
    def of(cls, mode: Mode, placement: PlacementName, salt: str, block_order: str, token_ids: Sequence[int]) -> Self:
        """The record of a prompt whose KV has the layout named by ``salt`` (``ChunkHasher.layout_salt``).

        Connectors copy blocks as they are, so engines with another ``block_order`` (on CPUs, one with AMX and one
        without) would read other KV.
        """
        names = b"\0".join((salt.encode(), block_order.encode(), b""))
        return cls(mode, placement, sha256(names + pack(tuple(token_ids))).hexdigest())

    def to_params(self) -> dict[str, Any]:
        """The record as ``kv_transfer_params``."""
        fields = {"mode": self.mode, "placement": self.placement, "digest": self.digest}
        return {HANDOVER_KEY: {"version": VERSION, **fields}}

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Self | None:
        """The record in ``kv_transfer_params``; ``None`` for one of another version.

        Raises ``ValueError`` without a valid record.
        """
        fields = params.get(HANDOVER_KEY)
        if not isinstance(fields, dict) or type(version := fields.get("version")) is not int:
            raise ValueError(f"blocks of another engine need the record {HANDOVER_KEY} of the server that filled them")
        if version != VERSION:
            return None
        texts = (fields.get("mode"), fields.get("placement"), fields.get("digest"))
        is_valid = texts[0] in get_args(Mode) and texts[1] in get_args(PlacementName) and isinstance(texts[2], str)
        if not is_valid or len(fields) != 1 + len(texts):
            raise ValueError(f"{HANDOVER_KEY} is not a handover of version {VERSION}")
        return cls(*texts)  # type: ignore[arg-type]  # checked above


def is_given_away(params: Mapping[str, Any]) -> bool:
    """Whether ``kv_transfer_params`` ask to keep the request's blocks for another engine."""
    return bool(params.get("do_remote_decode"))


def is_taken_over(params: Mapping[str, Any]) -> bool:
    """Whether ``kv_transfer_params`` name blocks of another engine."""
    return bool(params.get("do_remote_prefill"))
