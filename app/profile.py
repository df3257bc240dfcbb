# SPDX-License-Identifier: Apache-2.0
"""What was measured of one model, by ``tessera calibrate``, and what requests get that leave it to the server."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from app.modes import is_mode, link_tokens, strategy_of
from cache.positions.strategy import TRAINED_FOR, DefaultStrategy, strategy_for
from engine_ext.wire.request import CacheOptions, Decision

PROFILE_NAME: Final = "profile.json"
"""A profile in its model's own folder has a name that ends so: the model's digest leaves it out."""


_SHARED_IN_PLACE: Final = ("parallel", "shared")
"""Modes whose chunks requests share in place, the one that needs less first."""


class ProfileError(ValueError):
    """A profile can't be used; the message says why."""


def _known(name: str) -> str:
    if not is_mode(name):
        raise ValueError(f"there is no mode {name!r}")
    return name


Mode = Annotated[str, AfterValidator(_known)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Estimate(_Part):
    """A mean with its 95 % interval; shares from 0 to 1."""

    mean: float
    low: float
    high: float


class Measured(_Part):
    """One mode, on questions with so many chunks.

    ``difference`` is its accuracy minus full attention's, ``logprob_difference`` that of the right answer's log
    probability, in nats.
    """

    mode: Mode
    answers: int
    accuracy: Estimate | None
    difference: Estimate | None
    logprob_difference: Estimate | None = None
    first_token_ms: float | None
    """Median time to first token: chunks cached, or, of full attention, whatever vLLM's prefix cache had."""


class Kind(_Part):
    """The mode of requests with so many chunks. ``is_certain``: the difference's interval is within the tolerance.

    ``holds`` names all modes whose accuracy is within the tolerance.
    """

    min_chunks: int = Field(ge=1)
    max_chunks: int = Field(ge=1)
    mode: Mode
    is_certain: bool
    holds: tuple[Mode, ...] = ()
    measured: tuple[Measured, ...]

    def in_place(self) -> Self:
        """The kind for a server in place: a mode whose chunks can be shared, if one holds and reuse is decided for."""
        shareable = next((mode for mode in _SHARED_IN_PLACE if mode in self.holds and self.mode != "full"), self.mode)
        return self.model_copy(update={"mode": shareable})


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """``weights`` is the digest of the model's files."""

    weights: str
    trained_for: tuple[str, ...]


def described(model: str, revision: str | None = None, download_dir: str | None = None) -> DescribedModel:
    """What a profile says of a model, a folder or a name of the model hub's; raises :class:`ProfileError`.

    ``revision`` and ``download_dir`` are vLLM's flags.
    """
    from engine_ext.start.fingerprint import UnknownWeightsError, files_digest, model_folder  # takes seconds to import

    try:
        folder = model_folder(model, revision, download_dir)
        configuration = json.loads((folder / "config.json").read_bytes())
        return DescribedModel(files_digest(folder), tuple(configuration.get(TRAINED_FOR, ())))
    except (UnknownWeightsError, OSError, ValueError) as error:
        raise ProfileError(str(error)) from error


class Profile(_Part):
    """``weights`` is the digest of the model's files. ``kinds`` go from few chunks to many."""

    format: Literal[1] = 1
    model: str
    weights: str
    trained_for: tuple[Mode, ...]
    """Modes that the model says it was trained for (:data:`TRAINED_FOR`)."""
    questions: str
    questions_sha256: str
    tolerance: float
    tessera: str
    vllm: str
    kinds: tuple[Kind, ...]

    @classmethod
    def read(cls, path: Path) -> Self:
        """The profile in a file; raises :class:`ProfileError`."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ProfileError(f"{path}: {error.strerror}") from error
        except ValidationError as error:
            fault = error.errors()[0]
            where = ".".join(map(str, fault["loc"])) or "it"
            raise ProfileError(f"{path} is not a profile of tessera calibrate: {where}: {fault['msg']}") from error

    def in_place(self) -> Self:
        """The profile for a server that shares chunks in place."""
        return self.model_copy(update={"kinds": tuple(kind.in_place() for kind in self.kinds)})

    @property
    def strategy(self) -> DefaultStrategy:
        """The strategy of the server's requests; :meth:`decide` has the last word, by number of chunks."""
        reusing = {kind.mode for kind in self.kinds} - {"full"}
        if len(reusing) == 1:
            return DefaultStrategy(strategy_of(reusing.pop()), "the profile's")
        return replace(strategy_for(self.trained_for), why="the profile decides by number of chunks", is_known=True)

    def decide(self, num_chunks: int, adapter: str = "") -> Decision:
        """The mode for a request with ``num_chunks`` chunks, one or more.

        One chunk sees all that full attention would show it. Between what was measured the larger number counts, beyond
        it nothing is known, nor of the model with an adapter.
        """
        if num_chunks == 1:
            return Decision("shared", "one chunk: nothing is lost")
        if adapter:
            return Decision("full", "the profile is of the model without an adapter")
        for kind in self.kinds:
            if num_chunks <= kind.max_chunks:
                return Decision(kind.mode, f"the profile has {kind.mode} for up to {kind.max_chunks} chunks")
        return Decision("full", f"the profile has nothing for {num_chunks} chunks")

    def applied(self, options: CacheOptions, num_chunks: int, adapter: str = "") -> CacheOptions:
        """The options with what the profile decides in them."""
        decision = self.decide(num_chunks, adapter)
        if decision.mode == "full":
            return replace(options, mode="full", decision=decision)
        strategy, links = strategy_of(decision.mode), link_tokens(decision.mode)
        return replace(options, position_strategy=strategy, link_tokens=links, decision=decision)
