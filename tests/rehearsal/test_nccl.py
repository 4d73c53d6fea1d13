"""NVIDIA's own NCCL, which torch brings, as far as it goes without a GPU. What comes after is tested over a stub of it
(tests/unit/refit/test_nccl.py)."""

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from nemo_edo.refit.libnccl import ID_BYTES, Library


@pytest.fixture(scope="module")
def library() -> Library:
    if torch.version.cuda is None:
        pytest.skip("a torch without CUDA brings no NCCL")
    [folder] = find_spec("nvidia.nccl").submodule_search_locations
    return Library(Path(folder) / "lib" / "libnccl.so.2")


def test_it_has_all_functions_that_are_called_and_tells_its_version(library):
    major = torch.version.cuda.partition(".")[0]
    assert library.version == version(f"nvidia-nccl-cu{major}")


def test_every_group_of_gpus_gets_its_own_id(library):
    one, other = library.unique_id(), library.unique_id()
    assert len(one) == len(other) == ID_BYTES and one != other
