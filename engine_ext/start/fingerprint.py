# SPDX-License-Identifier: Apache-2.0
"""Fingerprint of an engine's KV, independent of where its model's files lie."""

import hashlib
import json

from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.platforms import current_platform

from engine_ext.start.weights import UnknownWeightsError, files_digest, model_folder
from engine_ext.wire.vllm_compat import vllm_version

_FROM_FILES = frozenset({"auto", "hf", "safetensors", "fastsafetensors", "pt", "npcache", "mistral", "gguf"})

_ABOUT_FILES = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})


def engine_fingerprint(config: VllmConfig, weights: str | None, adapter: str = "") -> str:
    """Digest of everything beside the tokens that determines their KV, and of how layers are divided among workers.

    Tensor parallelism divides heads, by which files are cut (:mod:`engine_ext.wire.parts`).

    Without a digest of the ``weights`` (:func:`weights_digest`) the model's name stands for them, which is sufficient
    while no KV leaves the process. ``adapter`` is the digest of the adapter for writing.
    """
    model, parallel = config.model_config, config.parallel_config
    fields = model.hf_config.to_dict()
    facts = {
        "vllm": vllm_version(),
        "device": current_platform.device_type,
        "model": weights or [model.model, model.revision, model.code_revision],
        "adapter": adapter,
        "config": {name: value for name, value in fields.items() if name not in _ABOUT_FILES},
        "dtype": [str(model.dtype), config.cache_config.cache_dtype, model.quantization],
        "drafter": _drafter(config),
        "stages": parallel.pipeline_parallel_size,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _drafter(config: VllmConfig) -> list[str | None] | None:
    """The draft model with KV of its own, by its name: its drafts are verified."""
    speculative = config.speculative_config
    if speculative is None or not (speculative.use_eagle() or speculative.uses_draft_model()):
        return None
    return [speculative.method, speculative.model, speculative.revision]


def weights_digest(model: ModelConfig, load: LoadConfig) -> str:
    """:func:`~engine_ext.start.weights.files_digest` of an engine's model; raises :class:`UnknownWeightsError`."""
    if str(load.load_format) not in _FROM_FILES:
        raise UnknownWeightsError(f"weights of --load-format {load.load_format} can't be identified")
    return files_digest(model_folder(model.model, model.revision, load.download_dir))
