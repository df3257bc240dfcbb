# SPDX-License-Identifier: Apache-2.0
"""Measurements of one model by ``tessera calibrate``, and the modes that follow for requests."""

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.modes import Mode, in_mode, needs_attention, strategy_of
from cache.positions.strategy import TRAINED_FOR, DefaultStrategy, strategy_for
from engine_ext.client.request import CacheOptions, Decision
from engine_ext.start.weights import PROFILE_NAME, UnknownWeightsError, files_digest, model_folder

logger = logging.getLogger(__name__)

_SHARED_IN_PLACE: Final = ("parallel", "shared")
"""Modes whose chunks requests share in place, the cheaper one first."""


class ProfileError(ValueError):
    """A profile can't be used; the message says why."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Estimate(_Part):
    """A mean with its 95 % interval; shares from 0 to 1."""

    mean: float
    low: float
    high: float


class Measured(_Part):
    """One mode on questions with a certain number of chunks.

    ``difference`` is its accuracy minus full attention's, ``logprob_difference`` that of the right answer's log
    probability, in nats.
    """

    mode: Mode
    answers: int
    accuracy: Estimate | None
    difference: Estimate | None
    logprob_difference: Estimate | None = None
    first_token_ms: float | None
    """Median time to first token: with all chunks cached; in full attention with vLLM's prefix cache as it was."""


class Kind(_Part):
    """The mode of requests by number of chunks. ``is_certain``: the difference's interval is within the tolerance.

    ``holds`` names all modes whose accuracy is within the tolerance.
    """

    min_chunks: int = Field(ge=1)
    max_chunks: int = Field(ge=1)
    mode: Mode
    is_certain: bool
    holds: tuple[Mode, ...] = ()
    measured: tuple[Measured, ...]

    def placed(self, placement: str | None, *, measures_attention: bool = False) -> Self:
        """The kind on a server with this placement, among the modes that hold.

        In place it is a mode with shared chunks, if one holds. Budgets and windows need a server that measures
        attention to chunks.
        """
        possible = [each for each in (self.mode, *self.holds) if measures_attention or not needs_attention(each)]
        shareable = [each for each in _SHARED_IN_PLACE if each in self.holds] if placement == "in-place" else []
        chosen = [*shareable, *possible, "full"] if self.mode != "full" else ["full"]
        return self.model_copy(update={"mode": chosen[0]})


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """``weights`` is the digest of the model's files, ``adapter`` that of its chunks' adapter, if there is one."""

    weights: str
    trained_for: tuple[str, ...]
    adapter: str = ""


def described(
    model: str, revision: str | None = None, download_dir: str | None = None, adapter: Path | None = None
) -> DescribedModel:
    """Describes a model, a folder or a hub name, for a profile; raises :class:`ProfileError`.

    ``revision`` and ``download_dir`` are vLLM's flags; ``adapter`` is a folder of `tessera adapt`.
    """
    from engine_ext.start.chunk_adapter import ChunkAdapter  # takes seconds to import

    try:
        folder = model_folder(model, revision, download_dir)
        weights, configuration = files_digest(folder), json.loads((folder / "config.json").read_bytes())
        if adapter is None:
            return DescribedModel(weights, tuple(configuration.get(TRAINED_FOR, ())))
        with TemporaryDirectory(prefix="tessera-") as copy:
            read = ChunkAdapter.read(adapter, Path(copy) / "adapter")
        return DescribedModel(weights, read.positions, read.digest)
    except (UnknownWeightsError, OSError, ValueError) as error:
        raise ProfileError(str(error)) from error


class Profile(_Part):
    """``weights`` and ``adapter`` are digests; ``kinds`` are sorted by number of chunks."""

    format: Literal[1] = 1
    model: str
    weights: str
    adapter: str = ""
    trained_for: tuple[Mode, ...]
    """Modes that the adapter or the model's configuration (:data:`TRAINED_FOR`) names."""
    questions: str
    questions_sha256: str
    tolerance: float
    tessera: str
    vllm: str
    kinds: tuple[Kind, ...]

    @classmethod
    def beside(cls, model: str) -> Self | None:
        """The profile in a model's folder; ``None`` without one, or, with a warning, if it is of anything else."""
        path = Path(model) / PROFILE_NAME
        if not path.is_file():
            return None
        try:
            profile = cls.read(path)
            if profile.adapter:
                reason = f"{path} is of an adapter"
            elif profile.weights == files_digest(path.parent):
                return profile
            else:
                reason = f"{path} is of other weights"
        except (ProfileError, OSError) as error:
            reason = str(error)
        logger.warning("the model's profile is ignored: %s", reason)
        return None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a profile; raises :class:`ProfileError`."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ProfileError(f"{path}: {error.strerror}") from error
        except ValidationError as error:
            fault = error.errors()[0]
            where = ".".join(map(str, fault["loc"])) or "it"
            raise ProfileError(f"{path} is not a profile of tessera calibrate: {where}: {fault['msg']}") from error

    def placed(self, placement: str | None, *, measures_attention: bool = False) -> Self:
        """The profile for a server with this placement of chunks, which may measure attention to them."""
        kinds = tuple(kind.placed(placement, measures_attention=measures_attention) for kind in self.kinds)
        return self.model_copy(update={"kinds": kinds})

    @property
    def needs_attention(self) -> bool:
        """Whether one of its modes needs a server that measures attention to chunks."""
        return any(needs_attention(kind.mode) for kind in self.kinds)

    @property
    def strategy(self) -> DefaultStrategy:
        """The server's default strategy; :meth:`decide` may override it by number of chunks."""
        reusing = {kind.mode for kind in self.kinds} - {"full"}
        if len(reusing) == 1:
            (mode,) = reusing
            return DefaultStrategy(strategy_of(mode), f"the profile's mode is {mode}")
        return replace(strategy_for(self.trained_for), why="the profile decides by number of chunks", is_known=True)

    def decide(self, num_chunks: int, adapter: str = "") -> Decision:
        """The mode for a request with ``num_chunks`` chunks, one or more.

        A single chunk of the plain model sees everything that it would see in full attention. Between measured numbers
        of chunks the larger one counts. Beyond the largest, and for clients' adapters, the mode is full attention.
        """
        if num_chunks == 1 and not self.adapter:
            return Decision("shared", "one chunk: nothing is lost")
        if adapter:
            return Decision("full", "the profile is of the model without an adapter")
        for kind in self.kinds:
            if num_chunks <= kind.max_chunks:
                return Decision(kind.mode, f"the profile has {kind.mode} for up to {kind.max_chunks} chunks")
        return Decision("full", f"the profile has nothing for {num_chunks} chunks")

    def applied(self, options: CacheOptions, num_chunks: int, adapter: str = "") -> CacheOptions:
        """The options, completed by the profile's decision."""
        decision = self.decide(num_chunks, adapter)
        if decision.mode == "full":
            return replace(options, mode="full", decision=decision)
        return in_mode(replace(options, decision=decision), decision.mode)
