"""Adaptations of megatron-core 0.19 and Megatron-Bridge 0.6 to a machine without CUDA, which they assume. Each one
replaces functions of torch or of Megatron in this process; its docstring says what fails without it, as tried."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
import types
from collections.abc import Callable, Iterator

import torch

CONFIG = {  # fields of a model's TransformerConfig that choose kernels which exist for CUDA only
    "bias_activation_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "cross_entropy_loss_fusion": False,
    "moe_permute_fusion": False,
    "moe_shared_expert_overlap": False,
    "deallocate_pipeline_outputs": False,  # gloo may still be sending them
}


def adapt() -> None:
    """Applies every adaptation; none can be taken back."""
    for apply in (fused_kernels, _torch_cuda, _device_argument, _tensor_type, _random_state, _experts):
        apply()
    with _uncompiled():  # Bridge's Gemma 2 compiles its attention as it is imported
        import_bridge()


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Inside the block, functions that are handed to torch.compile stay as they are written. Megatron and Bridge hand
    it their fused kernels as they are imported, which loads the compiler: 8 CPU seconds of each process."""
    compile_function = torch.compile
    torch.compile = lambda function: function
    try:
        yield
    finally:
        torch.compile = compile_function


def fused_kernels() -> None:
    """``CONFIG`` chooses none of Megatron's fused kernels here; the few that models use anyway run as they are written:
    megatron.core.jit chooses what decorates them, for modules that are imported later too."""
    with _uncompiled():
        import megatron.core.jit  # noqa: F401


class _NoStream(torch.cpu.Stream):
    """A CUDA stream where there is only one order of execution."""

    def synchronize(self) -> None:
        pass

    def record_event(self, event=None) -> _NoStream:
        return self  # all that came before it is done, as a stream's own ``synchronize`` says


def _torch_cuda() -> None:
    """Megatron allocates on ``torch.cuda.current_device()``, an index that only CUDA knows: without it no model can be
    wrapped for data parallelism (``param_and_grad_buffer``). Checkpoints and point-to-point communication wait for the
    GPU: without it no checkpoint is written. Bridge wraps models for data parallelism on a side stream, and experts'
    counts are copied on another: without it no model is built."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.Stream = _NoStream
    torch.cuda.current_stream = lambda device=None: _NoStream()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()


FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "ones_like", "rand", "randn", "tensor", "triu", "zeros",
             "zeros_like")  # fmt: skip
"""What Megatron and Bridge make tensors with."""


def _device_argument() -> None:
    """The schedules and the optimizers create tensors with ``device="cuda"``; Bridge moves others by ``.cuda()``:
    without it no optimizer takes a step. A TorchFunctionMode would cost every call of torch 4 microseconds."""
    # Private, but without it ``with torch.device(...)`` would no longer know these functions: torch lists them, by
    # identity, on first use, which has to happen before they are replaced.
    from torch.utils._device import _device_constructors

    _device_constructors()

    def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(factory)
        def made(*args, **kwargs) -> torch.Tensor:
            if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
                kwargs["device"] = torch.device("cpu")
            return factory(*args, **kwargs)

        return made

    for name in FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self


def _tensor_type() -> None:
    """The optimizers sort parameters by type names such as 'torch.cuda.FloatTensor'. Without it the distributed one
    refuses them, and the fp32 one leaves them all out."""
    type_of = torch.Tensor.type
    names = {f"torch.{kind}Tensor": f"torch.cuda.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")}

    def named(self: torch.Tensor, *args, **kwargs) -> str | torch.Tensor:
        result = type_of(self, *args, **kwargs)
        return names.get(result, result) if isinstance(result, str) else result

    torch.Tensor.type = named


def _random_state() -> None:
    """Megatron's random-state tracker reads and sets CUDA's generator. Without it no model can be built."""
    from megatron.core.tensor_parallel import random

    torch.cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed) and None
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda device=None, clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


def _experts() -> None:
    """Experts' tokens are exchanged by counts that become plain numbers on their way from the GPU. Without it they stay
    tensors, which ``all_to_all_single`` refuses: experts could not be split over processes.

    Experts add their bias in place to what a row-parallel layer returns. Without it gpt-oss takes no backward pass:
    in one process that is an autograd function's own input, which torch lets nobody change."""
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer.moe import token_dispatcher

    def to_numbers(tensor, as_numpy: bool = False, record_stream: bool = False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    def unless_alone(reduce: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda part, group=None: part if group is not None and group.size() == 1 else reduce(part, group=group)

    token_dispatcher.maybe_move_tensor_to_cpu = to_numbers
    for name in ("reduce_from_tensor_model_parallel_region", "reduce_scatter_to_sequence_parallel_region"):
        setattr(layers, name, unless_alone(getattr(layers, name)))


class _StandIn(types.ModuleType):
    """A module whose lower-case attributes are modules and whose others are layers, none of which is ever used."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        value = _StandIn(f"{self.__name__}.{name}") if name.islower() else type(name, (torch.nn.Module,), {})
        setattr(self, name, value)
        return value


LOOK_FOR_TRANSFORMER_ENGINE = (  # when imported: what Megatron-Bridge imports of megatron-core's models
    "gpt.gpt_layer_specs",
    "gpt.experimental_attention_variant_module_specs",
    "gpt.heterogeneous.heterogeneous_layer_specs",
    "mamba.mamba_layer_specs",
    "multimodal.llava_model",
)


def import_bridge() -> None:
    """Megatron-Bridge imports Transformer Engine at import (``peft.lora_layers``), for LoRA layers of a kind that only
    GPUs have: without it Bridge cannot be imported.

    Stand-in modules serve that one import and are taken out again. megatron-core's modules look for Transformer
    Engine when they are imported: they come first, so that they see that it is absent. Bridge's LoRA would take the
    mock layers that megatron-core then defines for real ones.
    """
    for module in LOOK_FOR_TRANSFORMER_ENGINE:
        importlib.import_module(f"megatron.core.models.{module}")

    if "transformer_engine" in sys.modules:
        return
    stand_ins = {"transformer_engine": _StandIn("transformer_engine")}
    stand_ins["transformer_engine.pytorch"] = stand_ins["transformer_engine"].pytorch
    sys.modules.update(stand_ins)
    # It reports each optional import that fails, one by a traceback, and megatron.training takes over the root logger.
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    logging.disable(logging.INFO)
    try:
        import megatron.bridge  # noqa: F401
        from megatron.bridge.peft import utils
    finally:
        logging.disable(logging.NOTSET)
        root.handlers[:] = handlers
        root.setLevel(level)
        for name in stand_ins:
            del sys.modules[name]
    utils.HAVE_TE = False
