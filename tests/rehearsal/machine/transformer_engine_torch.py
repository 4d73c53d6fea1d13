"""Transformer Engine's compiled extension, in torch: what the Python code of version 2.10 calls for layers in fp32 and
bf16, fused attention, rotary positions, mixtures of experts and Adam. It computes with torch's operators, so that the
pretended device checks where tensors are. Other functions, FP8's among them, can be named and not called."""

from enum import IntEnum

import torch

# --- enumerations -------------------------------------------------------------------------------------------------


class _Enumeration(type):
    """Any name is a member: ``DType.kFloat32`` is "DType.kFloat32"."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, f"{cls.__name__}.{name}")
        return getattr(cls, name)


ENUMERATIONS = (
    "CommOverlapAlgo", "CommOverlapType", "DType", "FP8BwdTensors", "FP8FwdTensors", "Float8BlockScaleTensorFormat",
    "NVTE_Activation_Type", "NVTE_Bias_Type", "NVTE_Mask_Type", "NVTE_QKV_Format",
    "NVTE_QKV_Layout", "NVTE_Softmax_Type",
)  # fmt: skip
globals().update({name: _Enumeration(name, (), {}) for name in ENUMERATIONS})

class NVTE_Fused_Attn_Backend(IntEnum):
    NVTE_No_Backend = -1
    NVTE_F16_max512_seqlen = 0
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


DTYPES = {"DType.kFloat32": torch.float32, "DType.kBFloat16": torch.bfloat16, "DType.kFloat16": torch.float16}

# --- products and norms -------------------------------------------------------------------------------------------


def generic_gemm(
    a, transpose_a, b, transpose_b, out, quantizer, out_dtype, bias, bias_dtype, gelu, gelu_in, grad, workspace,
    workspace_size, accumulate, *_, **__,
):  # fmt: skip
    """b a, as cuBLAS sees it: row-major b times the transpose of a, and so on. Returns (out, bias's gradient, ...)."""
    _bf16_or_fp32(a, b)
    first = a.t() if transpose_a else a.reshape(-1, a.shape[-1])
    rows, leading = b.reshape(-1, b.shape[-1]), b.shape[:-1]
    if transpose_b:
        rows, leading = rows.t(), (b.shape[-1],)
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
            continue
        found.append(generic_gemm(of_a, transpose_a, of_b, transpose_b, target, None, out_dtype, of_bias, bias_dtype,
                                  False, None, grad, None, 0, accumulate)[1])  # fmt: skip
    return found if grad else bias


def rmsnorm_fwd(x, weight, eps, out, quantizer, out_dtype, sm_margin, zero_centered):
    scale = x.float().square().mean(-1).add(eps).rsqrt()
    y = (x.float() * scale[..., None] * _norm_weight(weight, zero_centered)).to(x.dtype)
    return y if out is None else out.copy_(y), None, scale


def rmsnorm_bwd(grad, x, scale, weight, sm_margin, zero_centered):
    grad, normed = grad.reshape(x.shape).float(), x.float() * scale[..., None]
    of_weight = (grad * normed).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
    grad = grad * _norm_weight(weight, zero_centered)
    of_x = scale[..., None] * (grad - normed * (grad * normed).mean(-1, keepdim=True))
    return of_x.to(x.dtype), of_weight


def _norm_weight(weight, zero_centered):
    return weight.float() + 1 if zero_centered else weight.float()


def _bf16_or_fp32(*tensors) -> None:
    for tensor in tensors:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise NotImplementedError(f"no numbers of FP8 without a GPU: a product got a {type(tensor).__name__}")


# --- attention ----------------------------------------------------------------------------------------------------


def get_fused_attn_backend(is_training, q_dtype, kv_dtype, layout, bias, mask, softmax, dropout, heads, groups,
                           max_q, max_kv, width_qk, width_v, *_):  # fmt: skip
    """cuDNN's attention takes 16 bits, and heads of multiples of 8."""
    fits = DTYPES.get(q_dtype) in (torch.bfloat16, torch.float16) and width_qk % 8 == 0 and dropout == 0
    plain = (bias, softmax) == ("NVTE_Bias_Type.NVTE_NO_BIAS", "NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX")
    backends = NVTE_Fused_Attn_Backend
    return backends.NVTE_F16_arbitrary_seqlen if fits and plain else backends.NVTE_No_Backend


def fused_attn_fwd(
    max_q, max_kv, is_training, scale, dropout, zero_fill, layout, bias_type, mask, softmax, window, cu_q, cu_kv, q, k,
    v, dtype, cu_q_padded, cu_kv_padded, *_,
):  # fmt: skip
    """[output, what the backward pass needs, the generator's state]."""
    with torch.no_grad():
        out = _attention(q, k, v, layout, mask, scale, cu_q, cu_kv)
    return [out, out.new_empty(0), torch.zeros(2, dtype=torch.int64, device=q.device)]


def fused_attn_bwd(
    max_q, max_kv, scale, dropout, zero_fill, layout, bias_type, mask, softmax, window, deterministic, cu_q, cu_kv, q,
    k, v, out, grad, *_,
):  # fmt: skip
    with torch.enable_grad():
        leaves = [part.detach().requires_grad_() for part in (q, k, v)]
        again = _attention(*leaves, layout, mask, scale, cu_q, cu_kv)
    return list(torch.autograd.grad(again, leaves, grad.view_as(again)))


def _attention(q, k, v, layout, mask, scale, cu_q, cu_kv):
    """Every sequence by itself. The kernels read where sequences begin from the device."""
    if not (cu_q.is_cuda and cu_kv.is_cuda and cu_q.dtype == cu_kv.dtype == torch.int32):
        raise RuntimeError("fused attention: cu_seqlens are int32 on the device")
    name = layout.rpartition(".")[2]
    if "THD" in name:
        lengths_q, lengths_kv = cu_q.diff().tolist(), cu_kv.diff().tolist()
        total, found = sum(lengths_q), []
        parts = (x[: sum(lengths)].split(lengths) for x, lengths in ((q, lengths_q), (k, lengths_kv), (v, lengths_kv)))
        for sequence in zip(*parts, strict=True):
            found.append(_one(*(part.transpose(0, 1)[None] for part in sequence), mask, scale)[0].transpose(0, 1))
        return torch.cat([*found, torch.zeros_like(q[total:])])
    order = (1, 2, 0, 3) if "SB" in name else (0, 2, 1, 3)
    out = _one(*(part.permute(order) for part in (q, k, v)), mask, scale)
    back = (2, 0, 1, 3) if "SB" in name else (0, 2, 1, 3)
    return out.permute(back).contiguous()


def _one(q, k, v, mask, scale):
    """[b, heads, s, d] in fp32; queries are the last of the keys' positions."""
    heads = q.shape[1] // k.shape[1]
    k, v = (part.repeat_interleave(heads, 1) for part in (k, v))
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    if "CAUSAL" in mask:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(ahead.triu(1 + scores.shape[-1] - scores.shape[-2]), -torch.inf)
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


def _rotate(x, angles, sign):
    width = angles.shape[-1]
    turned, rest = x[..., :width].float(), x[..., width:]
    first, second = turned.chunk(2, -1)
    halves = torch.cat((-second, first), -1)
    return torch.cat(((turned * angles.cos() + halves * angles.sin() * sign).to(x.dtype), rest), -1)


def _rotate_all(x, angles, layout, cu_seqlens, sign):
    if cu_seqlens is not None:
        parts = x.split(cu_seqlens.diff().tolist())
        return torch.cat([_rotate(part[:, None], angles[: len(part)], sign)[:, 0] for part in parts])
    by_position = "SBHD" in layout
    return _rotate(x, angles[: x.shape[0]] if by_position else angles[: x.shape[1]].transpose(0, 1), sign)


def fused_rope_forward(x, angles, start, layout, interleaved, cu_seqlens, cp_size, cp_rank):
    return _rotate_all(x, angles, layout, cu_seqlens, 1)


def fused_rope_backward(grad, angles, start, layout, interleaved, cu_seqlens, cp_size, cp_rank, *_):
    return _rotate_all(grad, angles, layout, cu_seqlens, -1)


def convert_thd_to_bshd(x, cu_seqlens, rows, length):
    out = x.new_zeros(rows, length, *x.shape[1:])
    for row, part in enumerate(x.split(cu_seqlens.diff().tolist())):
        out[row, : len(part)] = part
    return out


def convert_bshd_to_thd(x, cu_seqlens, tokens):
    return torch.cat([x[row, :length] for row, length in enumerate(cu_seqlens.diff().tolist())])


# --- many tensors at a time ---------------------------------------------------------------------------------------


def multi_tensor_scale(chunk, overflow, lists, scale):
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_l2norm(chunk, overflow, lists, per_tensor=False):
    norms = [tensor.float().norm() for tensor in lists[0]]
    each = torch.stack(norms) if norms else overflow.new_zeros(1).float()
    return each.norm().view(1), each


multi_tensor_unscale_l2norm = multi_tensor_l2norm


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
