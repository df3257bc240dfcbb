# SPDX-License-Identifier: Apache-2.0
"""Positions shifted by the tokens' blocks."""

import inspect
import sys
from types import SimpleNamespace

import pytest
import torch

from engine_ext.core import shifts
from engine_ext.core.shifts import ShiftTable, register_shifted_models


@pytest.fixture
def table():
    made = ShiftTable(num_blocks=6, block_tokens=4, max_tokens=8, device=torch.device("cpu"))
    made.update({2: 8, 5: 3})
    return made


def test_positions_are_shifted_by_the_block_of_their_slot(table):
    positions = torch.tensor([20, 21, 22, 23, 24, 9])
    slots = torch.tensor([4 * 2, 4 * 2 + 3, 4 * 3, 4 * 5 + 1, 0, -1])
    shifted = table.shifted(positions, slots)
    assert shifted.tolist() == [12, 13, 22, 20, 24, 9]
    assert positions.tolist() == [20, 21, 22, 23, 24, 9], "vLLM's own buffer was written to"


def test_what_vllm_pads_positions_with_stays(table):
    assert table.shifted(torch.tensor([20, 7, 7]), torch.tensor([8])).tolist() == [12, 7, 7]


def test_they_are_always_in_one_place_where_a_captured_graph_finds_them(table):
    one, other = (table.shifted(torch.arange(n), torch.zeros(n, dtype=torch.int64)) for n in (8, 3))
    assert one.data_ptr() == other.data_ptr()


def test_a_block_can_be_shifted_anew_and_back(table):
    table.update({2: 1})
    table.update({5: 0})
    assert table.shifted(torch.tensor([9, 9]), torch.tensor([8, 20])).tolist() == [8, 9]


class Model:
    def forward(self, input_ids, positions, intermediate_tensors=None):
        return positions


@pytest.fixture
def wrapped(monkeypatch):
    monkeypatch.setitem(sys.modules, "some.models", SimpleNamespace(Model=Model))
    return getattr(shifts, "some.models.Model")


@pytest.mark.parametrize("as_keyword", [False, True])
def test_a_wrapped_model_sees_shifted_positions(as_keyword, wrapped, table, monkeypatch):
    positions, mapping = torch.tensor([20, 30]), {"layer": torch.tensor([8, 0])}
    monkeypatch.setattr(shifts, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(shifts, "get_forward_context", lambda: SimpleNamespace(slot_mapping=mapping))

    def run():
        return (
            wrapped().forward(None, positions=positions) if as_keyword else wrapped().forward(None, positions)
        ).tolist()

    monkeypatch.setattr(shifts, "_table", None)
    assert run() == [20, 30]
    monkeypatch.setattr(shifts, "_table", table)
    assert run() == [12, 30]
    mapping.clear()  # vLLM's memory profiling runs tokens without blocks
    assert run() == [20, 30]


def test_a_wrapped_model_is_of_its_class_and_has_its_signature(wrapped):
    assert issubclass(wrapped, Model)
    assert wrapped.__name__ == "Model"
    assert inspect.signature(wrapped.forward) == inspect.signature(Model.forward)
    assert getattr(shifts, "some.models.Model") is wrapped


def test_other_names_are_not_there():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        shifts.nothing  # noqa: B018


def test_the_registry_gives_out_wrapped_classes(monkeypatch):
    from vllm.model_executor.models import ModelRegistry

    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    plain = ModelRegistry.models["LlamaForCausalLM"].load_model_cls()
    for _ in range(2):  # a process may load its plugins more than once
        register_shifted_models(["LlamaForCausalLM", "NoSuchModel"])
        found = ModelRegistry.models["LlamaForCausalLM"].load_model_cls()
        assert found.__mro__[1] is plain
