"""NVIDIA's own NCCL, as far as it goes without a GPU. What comes after is tested over a stub of it
(tests/unit/refit/test_libnccl.py)."""

import pytest
import torch

from nemo_edo.refit.libnccl import ID_BYTES, Communicator, Library, NCCLError

from .prepare import NCCL, NotHere, nccl


@pytest.fixture(scope="module")
def library() -> Library:
    try:
        return Library(nccl())
    except NotHere as error:
        pytest.skip(str(error))


def test_it_has_all_functions_that_are_called_and_tells_its_version(library):
    assert f"=={library.version}\n" in NCCL.read_text()


def test_every_group_of_gpus_gets_its_own_id(library):
    one, other = library.unique_id(), library.unique_id()
    assert len(one) == len(other) == ID_BYTES and one != other


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_what_fails_is_said_in_its_words_with_the_file(library):
    with pytest.raises(NCCLError, match=r"ncclCommInitRankConfig: unhandled cuda error.*NCCL 2\.28\.9 \(/.*libnccl"):
        Communicator(library, library.unique_id(), rank=0, size=1, stream=lambda: None, check=lambda: None, limit_s=60)
