"""Compile every kernel for a GPU that need not be there: run as a program, it prints one JSON line per compiled kernel.

The wrappers are called with tensors on the CPU; instead of being launched, each kernel is compiled for the compute
capability in argv[1] with the launch's own types, constants and options.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from engine import kernels
from engine.kernels.skinny import skinny_linear, skinny_tiles
from engine.kernels.splitk import SplitScratch, splitk_linear, splitk_tiles

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


MEMORY = ("ld.global", "st.global", "cp.async.c", "cp.async.bulk.tensor", "atom.", "ret;")
"""What a program must not do before the kernels before it are done."""
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread and bytes of stack (spilled registers among them)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    return {name: int(re.search(rf"{name}:(\d+)", text).group(1)) for name in ("REG", "STACK")}  # type: ignore[union-attr]


def compile_instead(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    names = [parameter.name for parameter in kernel.params]
    values = dict(zip(names, args, strict=False)) | {name: kwargs.pop(name) for name in names if name in kwargs}
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        # As a launch does: an integer of 1 is a constant of the kernel.
        one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or one:
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
            continue
        if isinstance(value, TensorDescriptor):
            element = POINTERS[value.base.dtype].removeprefix("*")
            signature[parameter.name] = f"tensordesc<{element}{value.block_shape}>"
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
        else:
            signature[parameter.name] = "i32" if isinstance(value, int) else "fp32"
        aligned = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        if aligned and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment):
            attributes[(index,)] = [["tt.divisibility", 16]]
    if "PDL" in names:  # as on the device that is compiled for
        constants[(names.index("PDL"),)] = kwargs["launch_pdl"] = int(sys.argv[1]) >= 90
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options=kwargs)
    ptx = compiled.asm["ptx"]
    sizes = {str(name): value for name, value in values.items() if isinstance(value, (int, float)) and name.isupper()}
    report = {
        "kernel": kernel.__name__,
        "sizes": sizes,
        "dtype": str(next(v.dtype for v in values.values() if isinstance(v, torch.Tensor))).removeprefix("torch."),
        "shared": compiled.metadata.shared,
        **resources(compiled.asm["cubin"]),
        "tensor_cores": "mma" in ptx,
        "wgmma": "wgmma" in ptx,
        "dependent": compiled.metadata.launch_pdl,
        "waits_first": 0 < ptx.find("griddepcontrol.wait") < min(at for at in map(ptx.find, MEMORY) if at > 0),
        "releases_last": ptx.find("griddepcontrol.launch_dependents") > ptx.rfind("mma"),
        "bulk_prefetches": ptx.count("cp.async.bulk.prefetch"),
        "bulk_copies": ptx.count("cp.async.bulk.tensor"),
        "wide_loads": ptx.count("ld.global.v4.b32"),
        "wide_streamed_loads": ptx.count("ld.global.L1::evict_first.L2::cache_hint.v4.b32"),
        "wide_async_copies": ptx.count("cp.async.cg"),
    }
    print("COMPILED", json.dumps(report), flush=True)


def attention(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, page: int, window: Any, softcap: Any) -> None:
    cache = torch.empty(2, 8, page, kv_heads, dim, dtype=dtype)
    table, lengths = torch.zeros(4, 64, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    query, cu_query = torch.empty(4, heads, dim, dtype=dtype), torch.arange(5, dtype=torch.int32)
    scale = dim**-0.5
    kernels.paged_decode(query, *cache, table, lengths, scale, window, softcap)
    kernels.paged_prefill(query, *cache, table, cu_query, lengths, scale, window, softcap)


def rowwise(dtype: torch.dtype) -> None:
    x, weight = torch.empty(4, 2560, dtype=dtype), torch.empty(2560, dtype=dtype)
    kernels.rms_norm(x, weight, 1e-6)
    kernels.add_rms_norm(x, x.clone(), weight, 1e-6, unit_offset=True)
    kernels.silu_mul(x)
    kernels.gelu_tanh_mul(x)
    kernels.greedy_argmax(torch.empty(4, 151936, dtype=dtype))
    cache, slots = torch.empty(2, 8, 16, 8, 128, dtype=dtype), torch.zeros(4, dtype=torch.int64)
    qkv, table = torch.empty(4, 48 * 128, dtype=dtype), torch.empty(64, 128)
    norm = torch.empty(128, dtype=dtype)
    kernels.rope_and_write(qkv, table, table, slots, *cache, positions=slots.int(), query_norm=norm, key_norm=norm)
    kernels.rope_and_write(qkv, table[:4], table[:4], slots, *cache)
    skinny = torch.empty(64, 2560, dtype=dtype)
    for rows in (1, 2, 4, 8):
        skinny_linear(skinny[:rows], skinny, None, skinny_tiles(rows)[0])
    wide = torch.empty(128, 2560, dtype=dtype)
    scratch = SplitScratch(torch.empty(1 << 21), torch.zeros(64, dtype=torch.int32))
    for rows in (16, 32, 64, 128):
        launches = {astuple(tile)[:-2]: tile for tile in splitk_tiles(rows, *wide.shape)}
        for tile in launches.values():
            splitk_linear(wide[:rows], wide, None, tile, scratch)
    kernels.write_kv(qkv[:, :1024].view(4, 8, 128), qkv[:, 1024:2048].view(4, 8, 128), *cache, slots)


def sampling(dtype: torch.dtype, vocab: int) -> None:
    """Rows of a step that all sample, and some among them, into the slots' last tokens."""
    logits, rows = torch.empty(4, vocab, dtype=dtype), torch.zeros(2, dtype=torch.int64)
    temperature, top_k, keys = torch.ones(4), torch.ones(4, dtype=torch.int64), torch.ones(4, dtype=torch.int64)
    for some in (None, rows):
        cuts = kernels.filter_cuts(logits, temperature, top_k, temperature, temperature, some)
        kernels.gumbel_argmax(logits, temperature, keys, cuts, some, keys, slots=keys, last_token=keys)
    kernels.gumbel_argmax(logits, temperature, keys)


if __name__ == "__main__":
    JITFunction.run = compile_instead
    attention(torch.bfloat16, 32, 8, 128, 256, None, None)
    attention(torch.bfloat16, 32, 8, 128, 16, None, None)
    if "all" in sys.argv:
        attention(torch.bfloat16, 16, 8, 256, 32, 4096, 50.0)
        attention(torch.float16, 32, 4, 96, 12, None, None)
        attention(torch.bfloat16, 12, 12, 64, 16, 512, None)
        attention(torch.float32, 8, 2, 128, 16, None, None)
        attention(torch.float32, 8, 2, 256, 16, None, 50.0)
    rowwise(torch.bfloat16)
    sampling(torch.bfloat16, 151936)
    sampling(torch.float32, 262208)
