# SPDX-License-Identifier: Apache-2.0
"""scripts/check_vllm_names.py: correct for the installed vLLM, and detects what is missing or only raises."""

import ast
import importlib.util
import tarfile
from pathlib import Path

import pytest

from scripts.check_vllm_names import Active, VllmSources, opened, problems, problems_on_ascend

SITE_PACKAGES = Path(importlib.util.find_spec("vllm").origin).parents[1]
INSTALLED = VllmSources(SITE_PACKAGES)
CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base"


class Changed(VllmSources):
    """The installed vLLM, with ``old`` replaced by ``new`` in one module."""

    def __init__(self, module: str, old: str, new: str):
        super().__init__(SITE_PACKAGES)
        self._trees = dict(INSTALLED._trees)  # they take long to parse
        path = SITE_PACKAGES.joinpath(*module.split("."))
        source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        assert old in source
        self._trees[module] = ast.parse(source.replace(old, new))


def test_the_installed_version_has_everything():
    assert list(problems(INSTALLED)) == []


@pytest.mark.parametrize(
    ("module", "old", "new", "message"),
    [
        ("vllm.exceptions", "class VLLMValidationError", "class Other", "vllm.exceptions has no VLLMValidationError"),
        ("vllm.inputs.engine", "cache_salt: str", "salt: str", "tokens_input takes no cache_salt"),
        ("vllm.v1.engine.async_llm", "def collective_rpc", "def rpc", "AsyncLLM has no collective_rpc"),
        ("vllm.v1.engine.async_llm", "args: tuple", "arguments: tuple", "collective_rpc takes no args"),
        ("vllm.v1.engine.async_llm", "self.output_processor =", "self.out =", "AsyncLLM has no output_processor"),
        ("vllm.config", "KVTransferConfig", "Other", "vllm.config has no KVTransferConfig"),
        ("vllm.config.kv_transfer", "kv_load_failure_policy", "policy", "takes no kv_load_failure_policy"),
        (CONNECTOR, "def on_new_request(", "def on_request(", "KVConnectorBase_V1 has no on_new_request"),
        (
            CONNECTOR,
            "wait_for_save(self)",
            "wait_for_save(self, step)",
            "ChunkCacheConnector.wait_for_save does not take",
        ),
        (CONNECTOR, "def wait_for_save(", "def wait_for_saves(", "ChunkCacheConnector lacks wait_for_saves"),
    ],
)
def test_what_is_missing_is_noticed(module, old, new, message):
    found = list(problems(Changed(module, old, new)))
    assert any(message in each for each in found), found


# What the tests' fakes stand for, of vLLM-Ascend and torch_npu.
ASCEND = {
    "vllm_ascend/__init__.py": "",
    "vllm_ascend/platform.py": """
from vllm.platforms import Platform
class NPUPlatform(Platform):
    device_type: str = "npu"
    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        'Do not implement'
        raise NotImplementedError
""",
    "vllm_ascend/patch/platform/patch_torch_accelerator.py": "torch.accelerator.empty_cache = torch.npu.empty_cache",
    "vllm_ascend/ascend_config.py": """
class AscendConfig:
    def __init__(self):
        self.enable_kv_nz = False
""",
    "vllm_ascend/core/kv_cache_interface.py": """
from vllm.v1.kv_cache_interface import MLAAttentionSpec
class AscendMLAAttentionSpec(MLAAttentionSpec):
    sparse_head_dim: tuple[int, ...] | None = None
    compress_ratio: int = 1
""",
    "vllm_ascend/quantization/utils.py": "def get_model_file(model, filename, revision=None): ...",
    "vllm_ascend/device_allocator/camem.py": """
class CaMemAllocator:
    def __init__(self):
        self.current_tag, self.allocator_and_pools, self.pointer_to_data = "", {}, {}
    @staticmethod
    def get_instance(): ...
    def use_allocation_tag(self, tag): ...
    def use_memory_pool(self, tag=None): ...
    def python_malloc_callback(self, allocation_handle): ...
""",
    "vllm_ascend/device/device_op.py": """
class BaseDeviceAdaptor:
    @classmethod
    def reshape_and_cache(cls, key, value, key_cache, value_cache, slot_mapping): ...
class A5DeviceAdaptor(BaseDeviceAdaptor): ...
""",
    "torch_npu/__init__.py": "",
    "torch_npu/npu/__init__.py": """
from .streams import Event
def current_stream(device=None): ...
def set_device(device): ...
def mem_get_info(device=None): ...
""",
    "torch_npu/npu/streams.py": "class Event: ...",
    "torch_npu/lib/libtorch_npu.so": (
        "\0_npu_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
        "Tensor slot_indices) -> ()\0npu_scatter_pa_kv_cache(Tensor key, Tensor value, Tensor(a!) key_cache, "
        "Tensor(b!) value_cache, Tensor slot_mapping, *, Tensor? compress_lens=None, "
        "Tensor? compress_seq_offsets=None, Tensor? seq_lens=None, str? cache_mode='PA_NZ') -> ()\0"
        "npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? rotate=None) -> Tensor\0"
    ),
}


def on_ascend(code: str, folder: Path, old: str = "", new: str = "") -> list[str]:
    """Check ``code`` and the fakes against these packages, with ``old`` replaced by ``new``, and return the faults."""
    for name, text in ASCEND.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.replace(old, new) if old else text)
    tree = Active(is_ascends=True).visit(ast.parse(code))
    return list(problems_on_ascend({"ours.py": tree}, VllmSources(SITE_PACKAGES, folder)))


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (
            "current_platform.get_device_total_memory()",
            ["ours.py:1: vLLM-Ascend's get_device_total_memory only raises"],
        ),
        ("a() if ascend.is_ascend() else current_platform.get_device_total_memory()", []),
        ("if not is_ascend():\n    current_platform.get_device_total_memory()", []),
        ("current_platform.is_cpu()", []),  # vLLM's own
        ("current_platform.fly()", ["ours.py:1: vLLM-Ascend's platform has no fly"]),
        ("torch.accelerator.get_memory_info()", ["ours.py:1: torch.accelerator.get_memory_info is not for NPUs"]),
        ("torch.accelerator.empty_cache()", []),
        ("torch_npu.npu.mem_get_info()", []),
        ("torch_npu.npu.memory()", ["ours.py:1: there is no torch_npu.npu.memory"]),
        ("torch_npu.npu_rotary_mul(a, b, c)", []),
        ("torch_npu.npu_turn(a)", ["ours.py:1: there is no torch_npu.npu_turn"]),
    ],
)
def test_what_ascend_lacks_or_only_raises_at_is_noticed(code: str, found: list[str], tmp_path: Path) -> None:
    assert on_ascend(code, tmp_path) == found


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (", device_id: int = 0", "", "FakeNpuPlatform.get_device_total_memory takes ['device_id=0'], NPUPlatform's []"),
        ("raise NotImplementedError", "return 1", "FakeNpuPlatform.get_device_total_memory: one only raises"),
        ("def use_allocation_tag", "def use_tag", "FakeCaMemAllocator.use_allocation_tag: CaMemAllocator has none"),
        ("self.pointer_to_data", "self.pointers", "FakeCaMemAllocator.pointer_to_data: CaMemAllocator has none"),
        ("get_model_file(model, ", "get_model_file(", "FakeModelFiles.get_model_file takes ['model', "),
        ("value_cache, slot_mapping)", "value_cache, slots)", "DeviceOperatorA5.reshape_and_cache takes ["),
        ("rotary_mode='half'", "rotary_mode='interleave'", "npu_rotary_mul takes ["),
        ("self.enable_kv_nz", "self.kv_nz", "AscendConfig has no enable_kv_nz"),
        ("sparse_head_dim", "head_dims", "FakeMLAAttentionSpec.sparse_head_dim: AscendMLAAttentionSpec has none"),
        ("def set_device", "def set", "torch_npu.npu has no set_device"),
    ],
)
def test_fakes_that_are_unlike_what_they_stand_for_are_noticed(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    found = on_ascend("", tmp_path, old, new)
    assert any(message in each for each in found), found


def test_a_function_that_only_raises_may_not_be_called():
    old = "    async def collective_rpc(\n"
    new = "    async def collective_rpc(self, *args):\n        raise NotImplementedError\n    async def rpc(\n"
    assert any("collective_rpc only raises" in each for each in problems(Changed("vllm.v1.engine.async_llm", old, new)))


def test_a_source_archive_is_read(tmp_path: Path) -> None:
    (tmp_path / "platform.py").write_text("class NPUPlatform: ...")
    with tarfile.open(tmp_path / "vllm_ascend-0.23.0.tar.gz", "w:gz") as archive:
        for name in ("__init__", "platform"):
            archive.add(tmp_path / "platform.py", f"vllm_ascend-0.23.0/vllm_ascend/{name}.py")
    sources = VllmSources(opened(tmp_path / "vllm_ascend-0.23.0.tar.gz"))
    assert sources.find("vllm_ascend.platform", "NPUPlatform") is not None
    assert sources.find("vllm_ascend.platform", "GPUPlatform") is None
