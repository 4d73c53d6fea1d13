"""NVIDIA's own NCCL, which torch brings, as far as it goes without a GPU. What comes after is tested over a stub of it
(tests/unit/refit/test_nccl.py)."""

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from nemo_edo.refit.libnccl import ID_BYTES, Library


@pytest.mark.skipif(torch.version.cuda is None, reason="a torch without CUDA brings no NCCL")
def test_it_has_all_functions_that_are_called_tells_its_version_and_gives_every_group_its_own_id():
    [folder] = find_spec("nvidia.nccl").submodule_search_locations
    library = Library(Path(folder) / "lib" / "libnccl.so.2")
    major = torch.version.cuda.partition(".")[0]
    assert library.version == version(f"nvidia-nccl-cu{major}")
    one, other = library.unique_id(), library.unique_id()
    assert len(one) == len(other) == ID_BYTES and one != other
