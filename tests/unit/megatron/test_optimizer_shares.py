import itertools
import math

import pytest
import torch

from nemo_edo.megatron.optimizer_shares import rectangles


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 4), (1, 5), (4, 1, 2)])
def test_the_rectangles_of_every_range_are_the_range_in_its_order(shape: tuple[int, ...]):
    flat = torch.arange(math.prod(shape))
    for begin, end in itertools.combinations_with_replacement(range(len(flat) + 1), 2):
        blocks = list(rectangles(shape, begin, end))
        found = [flat.view(shape)[tuple(slice(o, o + n) for o, n in zip(*block, strict=True))].flatten()
                 for block in blocks]  # fmt: skip
        assert torch.equal(torch.cat([flat[:0], *found]), flat[begin:end])
        assert len(blocks) <= 2 * len(shape) - 1
