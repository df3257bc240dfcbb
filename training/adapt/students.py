# SPDX-License-Identifier: Apache-2.0
"""The two ways to adapt a model: soft tokens around each chunk, or LoRA."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn

from app.prompt.tokenization import SegmentTokenizer
from cache.positions.layout import CHUNK_TOKENS, ChunkedPrompt, ChunkTokens, pack, unpack
from cache.positions.strategy import TRAINED_FOR
from training.adapt.material import Sample
from training.adapt.model import hidden_states, log_probabilities
from training.adapt.rows import Row, Way, make_row

_IMPOSSIBLE: Final = -10_000.0
"""Highest logit of soft tokens on held-out prompts: ``exp`` of a tenth of it is 0 beside any other."""
_RIDGE: Final = 1e-3
_IN_PLACE: Final = ("shared", "parallel")
"""Positions at which chunks can be shared in place."""
_NONE: Final = ChunkTokens()


class Student(ABC):
    """A model in training, and in it the frozen teacher."""

    rate: ClassVar[float]
    """Learning rate of a run of this kind."""
    default_size: ClassVar[int]
    """Size unless one is asked for."""
    full_weight: ClassVar[float]
    """Weight of full attention's loss in a run of this kind."""

    def __init__(self, model: Any, segments: SegmentTokenizer) -> None:
        self.model = model
        self._segments = segments

    @torch.no_grad()
    def taught(self, sample: Sample) -> Tensor:
        """The teacher's log probabilities ``[branch tokens, vocabulary]``: full attention of the untouched model."""
        with self._untouched():
            return log_probabilities(self.model, make_row(sample.prompt, sample.branches, "full"))

    @abstractmethod
    def log_probabilities(self, sample: Sample, way: Way) -> Tensor:
        """The student's log probabilities ``[branch tokens, vocabulary]``."""

    @abstractmethod
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trained parameters by name."""

    @abstractmethod
    def save(self, folder: Path, tokenizer: Any, ways: Sequence[Way], samples: Iterable[Sample]) -> None:
        """Writes a model folder that vLLM serves; ``samples`` are held out ones."""

    def _untouched(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def _row(self, sample: Sample, way: Way, around: ChunkTokens = _NONE) -> Row:
        """A sample as the server composes it: soft tokens around chunks, and white space that fills shared blocks."""
        block_tokens = sample.block_tokens if way in _IN_PLACE else None
        padded, prompt = partial(self._segments.padded, block_tokens=block_tokens), sample.prompt
        chunks = tuple(replace(chunk, packed=padded(around.around(chunk.packed))) for chunk in prompt.chunks)
        system = unpack(padded(pack(prompt.system)))
        return make_row(replace(prompt, system=system, chunks=chunks), sample.branches, way)


class SoftTokens(Student):
    """Trained rows of the embedding table around each chunk, after KV Packet (https://arxiv.org/abs/2604.13226).

    ``size`` of them are before each chunk, half as many behind it.
    """

    rate = 3e-3
    default_size = 8
    full_weight = 1.0

    def __init__(self, model: Any, segments: SegmentTokenizer, seed: int, size: int = default_size) -> None:
        super().__init__(model, segments)
        model.requires_grad_(False)
        self._table: Tensor = model.get_input_embeddings().weight
        ids = range(len(self._table), len(self._table) + size + size // 2)
        self._before, self._behind = tuple(ids[:size]), tuple(ids[size:])
        rows = self._table.detach().float()
        noise = torch.randn(len(ids), rows.shape[1], generator=torch.Generator().manual_seed(seed))
        # White space harms an untrained model least.
        start = rows.mean(0) if segments.filler is None else rows[segments.filler]
        self._soft = nn.Parameter(start + 0.1 * rows.std() * noise.to(rows.device))

    def log_probabilities(self, sample: Sample, way: Way) -> Tensor:
        """See :meth:`Student.log_probabilities`."""
        row = self._row(sample, way, ChunkTokens(pack(self._before), pack(self._behind)))
        return log_probabilities(self.model, row, self._embedded(row))

    def parameters(self) -> dict[str, nn.Parameter]:
        """The soft tokens' embeddings."""
        return {"soft": self._soft}

    def save(self, folder: Path, tokenizer: Any, ways: Sequence[Way], samples: Iterable[Sample]) -> None:
        """Adds the soft tokens to tokenizer, embedding table and, as impossible ones, head."""
        number, impossible = len(self._soft), self._impossible(samples)
        config = self.model.config
        tokenizer.add_special_tokens(
            {"additional_special_tokens": [f"<|chunk-{index}|>" for index in range(number)]},
            replace_extra_special_tokens=False,
        )
        if tokenizer.convert_tokens_to_ids("<|chunk-0|>") != self._before[0]:
            raise ValueError("the tokenizer's next id is not the embedding table's next row")
        state = dict(self.model.state_dict())
        head = state["lm_head.weight"]
        state["lm_head.weight"] = torch.cat([head, impossible.to(head).expand(number, -1)])
        name = next(name for name, each in self.model.named_parameters() if each is self._table)
        state[name] = torch.cat([self._table.detach(), self._soft.detach().to(self._table)])
        config.update(
            {
                "vocab_size": len(state[name]),
                "tie_word_embeddings": False,
                TRAINED_FOR: list(ways),
                CHUNK_TOKENS: {"before": self._before, "behind": self._behind},
            }
        )
        type(self.model)(config).save_pretrained(folder, state_dict=state)
        tokenizer.save_pretrained(folder)

    def _embedded(self, row: Row) -> Tensor:
        table = torch.cat([self._table, self._soft.to(self._table.dtype)])
        embedded: Tensor = nn.functional.embedding(row.ids.to(table.device), table)
        return embedded

    @torch.no_grad()
    def _impossible(self, samples: Iterable[Sample]) -> Tensor:
        """A row of the head whose logit is far below all others, ``[hidden]``: minus what all hidden states share.

        By ridge regression of 1 on hidden states with and without chunks.
        """
        prompts = [(each, sample.branches) for sample in samples for each in (sample.prompt, _bare(sample.prompt))]
        rows = [make_row(prompt, branches, "full") for prompt, branches in prompts]
        hidden = torch.cat([hidden_states(self.model, row) for row in rows]).double()
        product = hidden.T @ hidden
        ridge = _RIDGE * product.diagonal().mean() * torch.eye(len(product), device=product.device, dtype=product.dtype)
        shared = torch.linalg.solve(product + ridge, hidden.sum(0))
        least = float((hidden @ shared).min())
        if least <= 0:
            raise ValueError("the model's hidden states have nothing in common, so soft tokens can't be ruled out")
        row: Tensor = shared * (_IMPOSSIBLE / least)
        return row.float()


def _bare(prompt: ChunkedPrompt) -> ChunkedPrompt:
    return replace(prompt, chunks=())


class Lora(Student):
    """Low-rank updates of all layers' matrices (https://arxiv.org/abs/2106.09685), by `peft`.

    ``size`` is their rank.
    """

    rate = 1e-3
    default_size = 16
    # Prompts without chunks get these weights too, and full attention has little to gain from any change.
    full_weight = 4.0

    def __init__(self, model: Any, segments: SegmentTokenizer, seed: int, size: int = default_size) -> None:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(seed)
        config = LoraConfig(r=size, lora_alpha=2 * size, target_modules="all-linear", task_type="CAUSAL_LM")
        self._peft: Any = get_peft_model(model, config)
        super().__init__(self._peft.get_base_model(), segments)

    def log_probabilities(self, sample: Sample, way: Way) -> Tensor:
        """See :meth:`Student.log_probabilities`."""
        return log_probabilities(self.model, self._row(sample, way))

    def parameters(self) -> dict[str, nn.Parameter]:
        """The low-rank matrices."""
        return {name: each for name, each in self._peft.named_parameters() if each.requires_grad}

    def save(self, folder: Path, tokenizer: Any, ways: Sequence[Way], samples: Iterable[Sample]) -> None:
        """Merges the updates into the weights."""
        merged = self._peft.merge_and_unload()
        merged.config.update({TRAINED_FOR: list(ways)})
        merged.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    def _untouched(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._peft.disable_adapter()
        return context


STUDENTS: Final[dict[str, type[SoftTokens] | type[Lora]]] = {"tokens": SoftTokens, "lora": Lora}
