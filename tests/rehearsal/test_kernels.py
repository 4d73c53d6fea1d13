"""The Triton kernels compile for GPUs, without one. Triton's interpreter runs them in the other tests of this folder;
tests/unit/parallel compares their numbers with fp64."""

import inspect
import re

import pytest
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nemo_edo.parallel import kernels

TYPES = {"targets": "*i64", "stride": "i32", "out_stride": "i32", "columns": "i32", "temperature": "fp32"}
CONSTANTS = {"_add_columns": ("TILE",), "_write_gradient": ("WITH_ENTROPY", "TILE")}
WARPS = 8


def compiled(name: str, dtype: str, capability: int, **constants):
    """dtype: of the logits and their gradient; all other tensors are fp32."""
    kernel = getattr(kernels, name)
    types = {**TYPES, **dict.fromkeys(("logits", "out"), f"*{dtype}"), **dict.fromkeys(CONSTANTS[name], "constexpr")}
    signature = {parameter: types.get(parameter, "*fp32") for parameter in inspect.signature(kernel.fn).parameters}
    source = ASTSource(fn=kernel, signature=signature, constexprs={key: constants[key] for key in CONSTANTS[name]})
    return compile_kernel(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": WARPS})


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("kernel", ["_add_columns", "_write_gradient"])
def test_kernels_compile_for_gpus(kernel, capability, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for dtype, with_entropy in (("bf16", True), ("fp32", False), *([("fp16", True)] if capability == 90 else [])):
        found = compiled(kernel, dtype, capability, WITH_ENTROPY=with_entropy, TILE=kernels.TILE)
        assert len(found.asm["cubin"]) > 1000
        assert f".target sm_{capability}" in found.asm["ptx"]
        assert ".local" not in found.asm["ptx"]  # nothing is spilled
        [row] = re.findall(r"(%\w+) = tt.get_program_id x", found.asm["ttir"])
        assert f"arith.extsi {row} : i32 to i64" in found.asm["ttir"]  # rows times strides pass 2^31 elements
        assert "max.NaN" in found.asm["ptx"]  # a NaN is not hidden
