import sys

from nemo_edo.megatron.implementations import FUSED, kernels


def test_a_cpu_model_runs_on_torch_and_megatron_alone(policy):
    found = kernels(policy.chunks)
    assert found["norm"] == "torch.nn.modules.normalization.RMSNorm"
    assert found["matrix products"] == "megatron.core.tensor_parallel.layers.RowParallelLinear"
    assert found["optimizer"] == "torch.optim.adamw.AdamW"
    assert found["rotary embedding"] == "torch"
    assert {found[part] for part in FUSED} == {"absent: the device is a CPU"}
    assert not [what for what in found.values() if "transformer_engine" in what or "apex" in what]


def test_stand_ins_never_make_megatron_core_believe_in_transformer_engine(policy):
    assert "transformer_engine" not in sys.modules
    assert not sys.modules["megatron.core.extensions.transformer_engine"].HAVE_TE
