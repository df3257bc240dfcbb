# SPDX-License-Identifier: Apache-2.0
"""What was measured of one model, by ``tessera calibrate``, and what requests get that leave it to the server."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from app.modes import is_mode, link_tokens
from cache.layout import PositionStrategy
from engine_ext.request import CacheOptions, Decision

PROFILE_NAME: Final = "profile.json"
"""A profile in its model's own folder has a name that ends so: the model's digest leaves it out."""

TRAINED_FOR: Final = "chunk_attention"
"""Where a model's configuration names the modes that it was trained for."""


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
    """One mode, on questions with so many chunks. ``difference``: its accuracy minus that of full attention."""

    mode: Mode
    answers: int
    accuracy: Estimate | None
    difference: Estimate | None
    first_token_ms: float | None
    """Median time to first token: chunks cached, or, of full attention, whatever vLLM's prefix cache had."""


class Kind(_Part):
    """The mode of requests with so many chunks. ``is_certain``: the difference's interval is within the tolerance."""

    min_chunks: int = Field(ge=1)
    max_chunks: int = Field(ge=1)
    mode: Mode
    is_certain: bool
    measured: tuple[Measured, ...]


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """``weights`` is the digest of the model's files."""

    weights: str
    trained_for: tuple[str, ...]


def described(model: str, revision: str | None = None, download_dir: str | None = None) -> DescribedModel:
    """What a profile says of a model, a folder or a name of the model hub's; raises :class:`ProfileError`.

    ``revision`` and ``download_dir`` are vLLM's flags.
    """
    from engine_ext.fingerprint import UnknownWeightsError, files_digest, model_folder  # takes seconds to import

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
        strategy = PositionStrategy.SHARED if decision.mode == "shared" else PositionStrategy.OFFSET
        return replace(options, position_strategy=strategy, link_tokens=link_tokens(decision.mode), decision=decision)
