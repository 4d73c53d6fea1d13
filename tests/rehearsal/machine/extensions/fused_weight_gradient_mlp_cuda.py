"""apex's extension, in torch: with it, layers add weight gradients to Megatron's in the matrix product."""

from pretended_cuda import as_kernel


@as_kernel
def wgrad_gemm_accum_fp32(rows, gradients, total) -> None:
    total.addmm_(gradients.t().to(total.dtype), rows.to(total.dtype))


wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32
