"""Transformer Engine's compiled extension, in torch: what the Python code of version 2.20 calls for layers in fp32,
bf16 and FP8 with one scale for each tensor, fused attention, rotary positions, mixtures of experts and Adam. It
computes with torch's operators, so that the pretended device checks where tensors are. The rest can be named and not
called."""

import os
from enum import IntEnum

import torch
from pretended_cuda import as_kernel

# --- enumerations -------------------------------------------------------------------------------------------------


def _enumeration(name: str, members: str, prefix: str = "", start: int = 0) -> type[IntEnum]:
    return IntEnum(name, [f"{prefix}{member}" for member in members.split()], start=start)


DType = _enumeration("DType", "Byte Int32 Float32 Float16 BFloat16 Float8E4M3 Float8E5M2 Float4E2M1", "k")
FP8FwdTensors = _enumeration(
    "FP8FwdTensors", "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT GEMM3_OUTPUT"
)
FP8BwdTensors = _enumeration(
    "FP8BwdTensors", "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3"
)
Float8BlockScaleTensorFormat = _enumeration("Float8BlockScaleTensorFormat", "GEMM_READY COMPACT INVALID")
NVTEScalingMode = _enumeration(
    "NVTEScalingMode", "DELAYED_TENSOR_SCALING MXFP8_1D_SCALING BLOCK_SCALING_1D BLOCK_SCALING_2D NVFP4_1D_SCALING "
    "INVALID_SCALING", "NVTE_",
)  # fmt: skip
CommOverlapType = _enumeration("CommOverlapType", "RS AG")
CommOverlapAlgo = _enumeration(
    "CommOverlapAlgo", "BULK_OVERLAP_AG BULK_OVERLAP_RS SPLIT_PIPELINED_AG_P2P SPLIT_PIPELINED_RS "
    "SPLIT_PIPELINED_RS_P2P ATOMIC_GEMM_RS ATOMIC_GEMM_AG_P2P ATOMIC_GEMM_RS_P2P EXTERNAL_BULK_OVERLAP_AG",
)  # fmt: skip
NVTE_Bias_Type = _enumeration("NVTE_Bias_Type", "NO_BIAS PRE_SCALE_BIAS POST_SCALE_BIAS ALIBI", "NVTE_")
NVTE_Mask_Type = _enumeration(
    "NVTE_Mask_Type", "NO_MASK PADDING_MASK CAUSAL_MASK PADDING_CAUSAL_MASK CAUSAL_BOTTOM_RIGHT_MASK "
    "PADDING_CAUSAL_BOTTOM_RIGHT_MASK", "NVTE_",
)  # fmt: skip
NVTE_Softmax_Type = _enumeration("NVTE_Softmax_Type", "VANILLA_SOFTMAX OFF_BY_ONE_SOFTMAX LEARNABLE_SOFTMAX", "NVTE_")
NVTE_QKV_Format = _enumeration(
    "NVTE_QKV_Format", "BSHD SBHD THD SBHD_2BSHD BSHD_2SBHD THD_2BSHD THD_2SBHD BHSD QKV_Format_NOT_SET", "NVTE_"
)
NVTE_QKV_Layout = _enumeration(
    "NVTE_QKV_Layout", "SB3HD SBH3D SBHD_SB2HD SBHD_SBH2D SBHD_SBHD_SBHD BS3HD BSH3D BSHD_BS2HD BSHD_BSH2D "
    "BSHD_BSHD_BSHD T3HD TH3D THD_T2HD THD_TH2D THD_THD_THD SBHD_BSHD_BSHD BSHD_SBHD_SBHD THD_BSHD_BSHD THD_SBHD_SBHD "
    "Paged_KV_BSHD_BSHD_BSHD Paged_KV_BSHD_SBHD_SBHD Paged_KV_SBHD_BSHD_BSHD Paged_KV_SBHD_SBHD_SBHD "
    "Paged_KV_THD_BSHD_BSHD Paged_KV_THD_SBHD_SBHD BHSD_BHSD_BHSD QKV_Layout_NOT_SET", "NVTE_",
)  # fmt: skip
NVTE_Fused_Attn_Backend = _enumeration("NVTE_Fused_Attn_Backend", "No_Backend F16_arbitrary_seqlen FP8", "NVTE_", -1)
NVTERoutingMapFormat = _enumeration("NVTERoutingMapFormat", "BYTEMAP BITMAP_U8")
NVTEQBHistogramMode = _enumeration("NVTEQBHistogramMode", "TWO_KERNEL FUSED_ATOMIC")

DTYPES = {DType.kFloat32: torch.float32, DType.kBFloat16: torch.bfloat16, DType.kFloat16: torch.float16}

# --- products and norms -------------------------------------------------------------------------------------------


@as_kernel
def generic_gemm(
    a, transpose_a, b, transpose_b, out, quantizer, out_dtype, bias, bias_dtype, gelu, gelu_in, grad, workspace,
    workspace_size, accumulate, *_, **__,
):  # fmt: skip
    """b a, as cuBLAS sees it: row-major b times the transpose of a, and so on. Returns (out, bias's gradient, ...)."""
    a, b = (x.dequantize(dtype=torch.bfloat16) if hasattr(x, "_fp8_dtype") else x for x in (a, b))
    _bf16_or_fp32(a, b)
    first = a.t() if transpose_a else a.reshape(-1, a.shape[-1])
    rows, leading = b.reshape(-1, b.shape[-1]), b.shape[:-1]
    if transpose_b:
        rows, leading = rows.t(), (b.shape[-1],)
    if rows.dtype is torch.float32 and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0":
        rows, first = _to_tf32(rows), _to_tf32(first.float())
    product = rows @ first.to(rows.dtype)
    bias_grad = None
    if bias is not None and grad:
        bias_grad = b.reshape(-1, b.shape[-1]).sum(0).to(bias.dtype)
    elif bias is not None:
        product = product + bias
    if out is None:
        return product.to(DTYPES.get(out_dtype, product.dtype)).view(*leading, product.shape[-1]), bias_grad, None, None
    out.add_(product.view_as(out)) if accumulate else out.copy_(product.view_as(out))
    return out, bias_grad, None, None


def te_general_grouped_gemm(
    a, transpose_a, b, transpose_b, out, out_dtype, splits, bias, bias_dtype, single_output, gelu_in, grad, workspaces,
    workspace_size, accumulate, *_,
):  # fmt: skip
    """One product for each expert; ``out`` has a tensor for each, or one for all of them."""
    outs = out[0].split(splits) if single_output else out
    found = []
    for number, (of_a, of_b, target) in enumerate(zip(a, b, outs, strict=True)):
        of_bias = bias[number] if bias and bias[number].numel() else None
        if not of_b.numel():
            target.zero_() if not accumulate else None
            found.append(None if of_bias is None else torch.zeros_like(of_bias))
            continue
        found.append(generic_gemm(of_a, transpose_a, of_b, transpose_b, target, None, out_dtype, of_bias, bias_dtype,
                                  False, None, grad, None, 0, accumulate)[1])  # fmt: skip
    return found if grad else bias


@as_kernel
def rmsnorm_fwd(x, weight, eps, out, quantizer, out_dtype, sm_margin, zero_centered):
    scale = x.float().square().mean(-1).add(eps).rsqrt()
    y = (x.float() * scale[..., None] * _norm_weight(weight, zero_centered)).to(x.dtype)
    return y if out is None else out.copy_(y), None, scale


@as_kernel
def rmsnorm_bwd(grad, x, scale, weight, sm_margin, zero_centered):
    grad, normed = grad.reshape(x.shape).float(), x.float() * scale[..., None]
    of_weight = (grad * normed).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
    grad = grad * _norm_weight(weight, zero_centered)
    of_x = scale[..., None] * (grad - normed * (grad * normed).mean(-1, keepdim=True))
    return of_x.to(x.dtype), of_weight


def _norm_weight(weight, zero_centered):
    return weight.float() + 1 if zero_centered else weight.float()


def _to_tf32(numbers):
    """To the nearest number of 11 bits, as tensor cores round the factors of an fp32 product."""
    bits = numbers.contiguous().view(torch.int32)
    return ((bits + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)


def _bf16_or_fp32(*tensors) -> None:
    for tensor in tensors:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise NotImplementedError(f"not rehearsed: a product got a {type(tensor).__name__}")


# --- FP8 with one scale for each tensor, in the delayed and the tensorwise recipe -------------------------------------

FP8 = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}


def create_empty_quantized_tensor(quantizer, shape, dtype, device, pin_memory):
    """As Hopper's products want it, which read rows alone: the columns are a second copy."""
    from transformer_engine.pytorch.tensor import float8_tensor as of
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    if not isinstance(quantizer, (of.Float8Quantizer, of.Float8CurrentScalingQuantizer)):
        raise NotImplementedError(f"not rehearsed: {type(quantizer).__name__}")
    how = {"dtype": torch.uint8, "device": device, "pin_memory": pin_memory}
    parts = {
        "data": torch.empty(shape, **how) if quantizer.rowwise_usage else None,
        "data_transpose": torch.empty(shape[-1], *shape[:-1], **how) if quantizer.columnwise_usage else None,
        "fp8_scale_inv": torch.empty(1, **{**how, "dtype": torch.float32}),
        "fp8_dtype": quantizer.dtype, "quantizer": quantizer,
    }  # fmt: skip
    if quantizer.internal:
        return Float8TensorStorage(**parts, fake_dtype=dtype)
    return of.Float8Tensor(**parts, shape=torch.Size(shape), dtype=dtype, device=device)


@as_kernel
def quantize(x, quantizer, out=None, noop=None):
    if out is None:
        out = create_empty_quantized_tensor(quantizer, x.shape, x.dtype, x.device, False)
    _on_device(x, out._scale_inv)
    kind = FP8[DType(int(quantizer.dtype))]
    most, amax = torch.finfo(kind).max, x.detach().float().abs().amax()
    if type(quantizer).__name__ == "Float8CurrentScalingQuantizer":
        scale = torch.where(amax > 0, most / amax, 1.0)
    else:
        scale = quantizer.scale.clone()
        quantizer.amax.copy_(amax.view(1))
    codes = (x.detach().float() * scale).clamp(-most, most).to(kind).view(torch.uint8)
    out._scale_inv.copy_((1 / scale).view(1))
    if out._data is not None:
        out._data.copy_(codes.view(out._data.shape))
    if out._transpose is not None:
        out._transpose.copy_(codes.movedim(-1, 0).reshape(out._transpose.shape))
        out._transpose_invalid = False
    return out


def bgrad_quantize(grad, quantizer):
    return grad.reshape(-1, grad.shape[-1]).sum(0), quantize(grad, quantizer)


@as_kernel
def dequantize(x, dtype):
    _on_device(x._data)
    return (x._data.view(FP8[DType(int(x._fp8_dtype))]).float() * x._scale_inv).to(DTYPES[DType(int(dtype))])


@as_kernel
def fp8_transpose(data, dtype, out=None):
    _on_device(data)
    turned = data.movedim(-1, 0).contiguous()
    return turned if out is None else out.copy_(turned)


def _on_device(*tensors) -> None:
    if not all(tensor.is_cuda for tensor in tensors):
        raise RuntimeError("a kernel of FP8 got a tensor of the host")


# --- attention ----------------------------------------------------------------------------------------------------


def get_fused_attn_backend(asked) -> tuple[NVTE_Fused_Attn_Backend, str]:
    """cuDNN's attention takes 16 bits, and heads of multiples of 8. asked: FusedAttentionParams."""
    fits = DTYPES.get(asked.qkv_dtype) in (torch.bfloat16, torch.float16) and asked.head_dim_qk % 8 == 0
    plain = asked.bias_type == NVTE_Bias_Type.NVTE_NO_BIAS and asked.dropout == 0
    if fits and plain and asked.softmax_type == NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX:
        return NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, ""
    return NVTE_Fused_Attn_Backend.NVTE_No_Backend, "not rehearsed"


@as_kernel
def fused_attn_fwd(
    max_q, max_kv, is_training, scale, dropout, zero_fill, layout, out_format, scale_format, bias_type, mask, softmax,
    window, bottom_right, cu_q, cu_kv, q, k, v, dtype, cu_q_padded, cu_kv_padded, *_,
):  # fmt: skip
    """[output, the logarithms of the softmax's sums, the generator's state]."""
    _fits(layout, (out_format,), cu_q, cu_kv)
    parts = zip(_parts(q, layout, cu_q), _parts(k, layout, cu_kv), _parts(v, layout, cu_kv), strict=True)
    outs, sums = zip(*(_attend(*part, mask, scale) for part in parts), strict=True)
    logs = _whole(sums, layout, len(q)) if layout is THD else sums[0]
    return [_whole(outs, layout, len(q)), logs, torch.zeros(2, dtype=torch.int64, device=q.device)]


@as_kernel
def fused_attn_bwd(
    max_q, max_kv, scale, dropout, zero_fill, layout, out_format, grad_format, grads_layout, scale_format,
    grad_scale_format, bias_type, mask, softmax, window, bottom_right, deterministic, cu_q, cu_kv, q, k, v, out, grad,
    dtype, saved, *_,
):  # fmt: skip
    """As the kernels, from the softmax's sums over all keys, of which this call may have a part."""
    _fits(layout, (out_format, grad_format), cu_q, cu_kv)
    if grads_layout != layout:
        raise NotImplementedError(f"gradients in {grads_layout!r}")
    logs = _parts(saved[0], layout, cu_q) if layout is THD else [saved[0]]
    queries = (_parts(x, layout, cu_q) for x in (q, out, grad.view_as(out)))
    parts = zip(*queries, _parts(k, layout, cu_kv), _parts(v, layout, cu_kv), logs, strict=True)
    found = zip(*(_attend_back(*part, mask, scale) for part in parts), strict=True)
    return [*(_whole(grads, layout, len(x)) for grads, x in zip(found, (q, k, v), strict=True)), None]  # of the bias


THD = NVTE_QKV_Layout.NVTE_THD_THD_THD
ORDER = {NVTE_QKV_Layout.NVTE_SBHD_SBHD_SBHD: ((1, 2, 0, 3), (2, 0, 1, 3)),
         NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD: ((0, 2, 1, 3), (0, 2, 1, 3))}  # fmt: skip


def _fits(layout, formats, cu_q, cu_kv):
    """The kernels read where sequences begin from the device."""
    if not (cu_q.is_cuda and cu_kv.is_cuda and cu_q.dtype == cu_kv.dtype == torch.int32):
        raise RuntimeError("fused attention: cu_seqlens are int32 on the device")
    if (layout is not THD and layout not in ORDER) or any(f"_{form.name[5:]}_" not in layout.name for form in formats):
        raise NotImplementedError(f"attention of {layout!r} to {formats!r}")


def _parts(x, layout, cu):
    """[b, heads, s, d] of each sequence of a pack, or of all rows."""
    if layout is not THD:
        return [x.permute(ORDER[layout][0])]
    lengths = cu.diff().tolist()
    return [part.transpose(0, 1)[None] for part in x[: sum(lengths)].split(lengths)]


def _whole(parts, layout, tokens):
    if layout is not THD:
        return parts[0].permute(ORDER[layout][1]).contiguous()
    found = torch.cat([part[0].transpose(0, 1) for part in parts])
    return torch.cat([found, found.new_zeros(tokens - len(found), *found.shape[1:])])


def _scores(q, k, mask, scale):
    """[b, heads, s, k] in fp32; queries are the last of the keys' positions."""
    scores = q.float() @ k.float().repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * scale
    if "CAUSAL" not in mask.name:
        return scores
    ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
    return scores.masked_fill(ahead.triu(1 + scores.shape[-1] - scores.shape[-2]), -torch.inf)


def _attend(q, k, v, mask, scale):
    scores = _scores(q, k, mask, scale)
    out = scores.softmax(-1) @ v.float().repeat_interleave(q.shape[1] // v.shape[1], 1)
    return out.to(q.dtype), scores.logsumexp(-1, keepdim=True)


def _attend_back(q, out, grad, k, v, logs, mask, scale):
    groups, share = k.shape[1], q.shape[1] // k.shape[1]
    whole_k, whole_v = (part.float().repeat_interleave(share, 1) for part in (k, v))
    weights = (_scores(q, k, mask, scale) - logs).exp()
    inner = grad.float() @ whole_v.transpose(-1, -2) - (grad.float() * out.float()).sum(-1, keepdim=True)
    of_scores = weights * inner * scale
    of_k, of_v = of_scores.transpose(-1, -2) @ q.float(), weights.transpose(-1, -2) @ grad.float()
    of_k, of_v = (part.unflatten(1, (groups, share)).sum(2) for part in (of_k, of_v))
    return (of_scores @ whole_k).to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype)


def _rotate(x, angles, sign):
    width = angles.shape[-1]
    turned, rest = x[..., :width].float(), x[..., width:]
    first, second = turned.chunk(2, -1)
    halves = torch.cat((-second, first), -1)
    return torch.cat(((turned * angles.cos() + halves * angles.sin() * sign).to(x.dtype), rest), -1)


def _rotate_all(x, angles, layout, cu_seqlens, sign, cp_size):
    if cp_size > 1:
        raise NotImplementedError("not rehearsed: positions of context-parallel ranks")
    if cu_seqlens is not None:
        parts = x.split(cu_seqlens.diff().tolist())
        return torch.cat([_rotate(part[:, None], angles[: len(part)], sign)[:, 0] for part in parts])
    by_position = layout == NVTE_QKV_Format.NVTE_SBHD
    return _rotate(x, angles[: x.shape[0]] if by_position else angles[: x.shape[1]].transpose(0, 1), sign)


@as_kernel
def fused_rope_forward(x, angles, start, layout, interleaved, cu_seqlens, cp_size, *_):
    return _rotate_all(x, angles, layout, cu_seqlens, 1, cp_size)


@as_kernel
def fused_rope_backward(grad, angles, start, layout, interleaved, cu_seqlens, cp_size, *_):
    return _rotate_all(grad, angles, layout, cu_seqlens, -1, cp_size)


@as_kernel
def convert_thd_to_bshd(x, cu_seqlens, rows, length):
    out = x.new_zeros(rows, length, *x.shape[1:])
    for row, part in enumerate(x.split(cu_seqlens.diff().tolist())):
        out[row, : len(part)] = part
    return out


@as_kernel
def convert_bshd_to_thd(x, cu_seqlens, tokens):
    return torch.cat([x[row, :length] for row, length in enumerate(cu_seqlens.diff().tolist())])


# --- many tensors at a time ---------------------------------------------------------------------------------------


@as_kernel
def multi_tensor_scale(chunk, overflow, lists, scale):
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


multi_tensor_scale_tensor = multi_tensor_scale


@as_kernel
def multi_tensor_l2norm(chunk, overflow, lists, per_tensor=False):
    norms = [tensor.float().norm() for tensor in lists[0]]
    each = torch.stack(norms) if norms else overflow.new_zeros(1).float()
    return each.norm().view(1), each


multi_tensor_unscale_l2norm = multi_tensor_l2norm


@as_kernel
def multi_tensor_adam(chunk, overflow, lists, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay, *_):
    """mode: 1 for decoupled weight decay (AdamW), which is the only one that is asked for."""
    if mode != 1:
        raise NotImplementedError("Adam with weight decay in the gradient")
    for grad, parameter, first, second, *master in zip(*lists, strict=True):
        weight, grad = master[0] if master else parameter, grad.float()
        first.mul_(beta1).add_(grad, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        of_first, of_second = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1, 1)
        weight.sub_(lr * ((first / of_first) / ((second / of_second).sqrt() + eps) + weight_decay * weight))
        if master:
            parameter.copy_(weight)


def layernorm_fwd(*_):
    raise NotImplementedError("LayerNorm: the models that are rehearsed have RMSNorm")


layernorm_bwd = layernorm_fwd

# --- the machine, and the rest ------------------------------------------------------------------------------------


def get_num_cublas_streams() -> int:
    return 4


def get_cublasLt_version() -> int:
    return 130000


def get_cudnn_version() -> int:
    return 91600


def get_stream_priority_range(*_) -> tuple[int, int]:
    return -1, 0


def device_supports_multicast(*_) -> bool:
    return False


def ubuf_built_with_mpi() -> bool:
    return False


def __getattr__(name: str):
    """What is named and not called: classes with a capital, and functions."""
    if name.startswith("__"):
        raise AttributeError(name)
    if name[0].isupper():
        return type(name, (), {})

    def absent(*_, **__):
        raise NotImplementedError(f"transformer_engine_torch.{name} needs a GPU")

    return absent
