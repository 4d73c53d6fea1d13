"""What the import of a Hugging Face folder needs of each process's memory."""

import pytest
from helpers.tiny_models import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
SHAPE = {"num_hidden_layers": 24, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8,
         "num_key_value_heads": 8, "head_dim": 64}  # fmt: skip
"""312 MB, of which no layer has more than a twenty-fourth."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), "llama", **SHAPE)


@pytest.mark.parametrize("sizes", [{"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}])
def test_no_process_has_the_whole_model_in_memory_while_it_is_imported(two, folder, sizes):
    """Its own half is there before; the import adds a few tensors at a time."""
    whole = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    for rank in two.run("helpers.import_cases:memory_of_import", folder=folder, sizes=sizes):
        assert rank["held"] == pytest.approx(whole / 2, rel=0.01)
        assert rank["grown"] < whole / 4
