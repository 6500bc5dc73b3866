"""NVML's readings and the time of steps on a real device."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine import ContinuousBatchingConfig, init_continuous_batching
from harness.nvml import NvmlGpu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_nvml_reads_the_device_that_torch_uses() -> None:
    held = torch.zeros(2**28, dtype=torch.uint8, device="cuda")
    gpu = NvmlGpu(str(torch.cuda.get_device_properties(0).uuid))
    sample = gpu.sample()
    used = sample["gpu_used_bytes"]
    assert isinstance(used, int)
    assert used >= held.numel()
    assert sample["sm_clock_mhz"]
    assert sample["memory_clock_mhz"]
    assert sample["throttle"] is not None
    assert gpu.facts()["gpu.driver"]


@pytest.mark.parametrize("ahead", [False, True])
def test_every_step_that_samples_has_its_time_on_the_device(ahead: bool) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).to("cuda", torch.bfloat16).eval()
    config = ContinuousBatchingConfig(num_blocks=8, use_cuda_graph=ahead, use_async_batching=ahead)
    manager = init_continuous_batching(model, continuous_batching_config=config)
    manager.start()
    manager.add_request([1, 2, 3], request_id="a", max_new_tokens=16)
    assert manager.get_result(request_id="a", timeout=60) is not None
    manager.stop(block=True)
    log = list(manager.step_log)
    manager.destroy()
    assert len(log) >= 16
    times = [record.gpu_ms for record in log if record.gpu_ms is not None]
    assert len(times) >= 16
    assert all(0 < gpu_ms <= record.step_ms + 1 for gpu_ms, record in zip(times, log, strict=False))
