# SPDX-License-Identifier: Apache-2.0
"""Failures of our own code are no client's error, whatever type they have."""

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from cache.errors import EmptySegmentError
from cache.positions.layout import ChunkedPrompt, unpack
from engine_ext.client.defects import DefectError, blamed, is_defect
from engine_ext.client.request import PROGRESS, Progress
from tests.support.variables import having


def raised_by(act) -> Exception:
    try:
        act()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_ours_are_what_our_code_raises_and_no_others():
    assert is_defect(raised_by(lambda: unpack(None)))  # a TypeError
    assert is_defect(raised_by(lambda: unpack(b"123")))  # struct's error, called from our code
    assert not is_defect(raised_by(lambda: SamplingParams(temperature=-1)))
    assert not is_defect(raised_by(lambda: [][0]))
    assert not is_defect(raised_by(lambda: ChunkedPrompt((), (), ())))
    assert not is_defect(VLLMValidationError("a client's"))


def test_a_defect_is_blamed_on_the_server_and_a_clients_error_passes(caplog):
    with having(PROGRESS, Progress()):
        error = blamed(raised_by(lambda: unpack(None)))
        assert PROGRESS.get().is_servers
    assert isinstance(error, DefectError)
    assert "log says where" in str(error)
    assert "a defect: TypeError at " in caplog.text
    assert "layout.py" in caplog.text
    error = raised_by(lambda: ChunkedPrompt((), (), ()))
    assert isinstance(error, EmptySegmentError)
    assert blamed(error) is error
