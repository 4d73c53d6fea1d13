from types import SimpleNamespace

import pytest
import torch

from nemo_edo.megatron.shapes import InputShapes, input_shapes, pad_to


def config(**fields) -> SimpleNamespace:
    plain = {
        "tensor_model_parallel_size": 1, "sequence_parallel": False, "context_parallel_size": 1, "fp8": None,
        "pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None, "fp8_recipe": "tensorwise",
    }
    return SimpleNamespace(**{**plain, **fields})


TP4_SP = {"tensor_model_parallel_size": 4, "sequence_parallel": True}


@pytest.mark.parametrize(("fields", "multiple"), [
    (TP4_SP, 4),
    ({"context_parallel_size": 3}, 6),
    (TP4_SP | {"context_parallel_size": 2}, 8),
    ({"fp8": "hybrid"}, 16),
    (TP4_SP | {"fp8": "e4m3", "fp8_recipe": "mxfp8"}, 128),
    ({"fp8": "hybrid", "context_parallel_size": 2}, 32),
    (TP4_SP | {"fp8": "e4m3", "fp8_recipe": "blockwise"}, 512),  # each rank's tokens are gathered in blocks of 128
])
def test_every_rank_gets_whole_shares_of_a_sequence(fields, multiple):
    assert input_shapes(config(**fields)).multiple == multiple


def test_interleaved_stages_exchange_tensors_of_one_shape():
    shapes = input_shapes(config(pipeline_model_parallel_size=3, virtual_pipeline_model_parallel_size=2))
    assert shapes == InputShapes(multiple=1, uniform=True, group=3)
    assert shapes.fit([(2, 8), (3, 5)]) == [(3, 8), (3, 8)]


def test_lengths_are_rounded_up_and_padding_comes_last():
    assert InputShapes(multiple=4).fit([(2, 8), (3, 9)]) == [(2, 8), (3, 12)]
    assert pad_to(torch.tensor([[1, 2], [3, 4]]), (3, 3)).tolist() == [[1, 2, 0], [3, 4, 0], [0, 0, 0]]
