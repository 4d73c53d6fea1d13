"""From the last stage's hidden states to log-probabilities, of those positions alone that the loss reads.

The output layer is taken out of the model's forward pass: in its place the hidden states come out. Those at prompts and
padding are left, and the others are multiplied with the weight that the model would have used, tied or not: into
logits, or with the fused head without ever holding them (``linear_logprobs_and_entropy``). Weights, their names,
checkpoints, hooks and the generation engine are unaffected.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model
from torch import Tensor

from nemo_edo.config import FUSED_FROM_LOGITS
from nemo_edo.errors import UserError
from nemo_edo.parallel import linear_logprobs_and_entropy, vocab_parallel_logprobs_and_entropy


class LossHead:
    """What the last pipeline stage computes log-probabilities and entropies with.

    kind: "fused", "logits", or "auto", which chooses by the logits' number. Raises UserError for a fused head where the
    model's output layer does more than multiply.
    vocab_size: columns from here on pad the vocabulary.
    """

    def __init__(self, chunks: list[MegatronModule], kind: str, vocab_size: int) -> None:
        model = unwrap_model(chunks[-1])
        self._vocab_size = vocab_size
        self._layer = model.output_layer if model.post_process else None
        self._weight: Tensor | None = None
        plain = type(self._layer) is ColumnParallelLinear and self._layer.bias is None
        self._multiplies = plain and model.config.mtp_num_layers is None
        self._kind = kind
        if kind == "fused" and self._layer is not None and not self._multiplies:
            raise UserError(
                "model.loss_head fused needs an output layer that is a matrix product and no more; this model's is "
                f"{type(self._layer).__name__}: set model.loss_head=logits"
            )

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside the block the model's outputs are what ``__call__`` takes."""
        if not self._multiplies:
            yield
            return
        self._layer.forward = self._hidden_states
        try:
            yield
        finally:
            del self._layer.forward
            self._weight = None

    def _hidden_states(self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None):
        """The hidden states in the output layer's place: [s, b, h] whole on every tensor-parallel rank, as it would
        multiply them. With sequence parallelism the ranks' parts of the gradient are added up here on the way back, as
        the layer would."""
        self._weight = self._layer.weight if weight is None else weight
        if self._layer.sequence_parallel:
            group = self._layer.tp_group
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=group)
        return hidden, None

    def __call__(self, outputs: Tensor, targets: Tensor, read: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probabilities of ``targets`` [b, s] and entropies, of softmax(logits / temperature), each [b, s]; zero
        but at ``read``, the indices [n] into the b * s positions that the loss reads. outputs: the model's, [b, s,
        hidden], or [b, s, V / tp] where its output layer does more than multiply."""
        chosen = outputs.flatten(0, 1).index_select(0, read)[None]
        values = self._of_positions(chosen, targets.flatten().index_select(0, read)[None], temperature)
        nothing = values[0].new_zeros(targets.numel())
        return tuple(nothing.index_copy(0, read, value[0]).view_as(targets) for value in values)

    def _of_positions(self, outputs: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """[1, n] each, of [1, n, hidden or V / tp] and of [1, n]."""
        group = parallel_state.get_tensor_model_parallel_group()
        options = {"group": group, "temperature": temperature, "vocab_size": self._vocab_size}
        if self._multiplies and not self._layer.sequence_parallel:
            # Not before the model transposes its outputs: the gradient would come back transposed, and Megatron's
            # all-reduce of a tensor that is not contiguous adds up a copy and returns the tensor as it was.
            outputs = copy_to_tensor_model_parallel_region(outputs, group=self._layer.tp_group)
        many = self._multiplies and targets.numel() * self._layer.output_size_per_partition >= FUSED_FROM_LOGITS
        if self._kind == "fused" or (self._kind == "auto" and many):
            start = group.rank() * len(self._weight)
            return linear_logprobs_and_entropy(outputs, self._weight, targets, vocab_start=start, **options)
        logits = F.linear(outputs, self._weight) if self._multiplies else outputs
        start = group.rank() * logits.shape[-1]
        overwrite = torch.is_grad_enabled() and logits.requires_grad  # the logits, or the copy, are nobody else's
        return vocab_parallel_logprobs_and_entropy(
            logits, targets, vocab_start=start, overwrite_logits=overwrite, **options
        )
