import sys

import pytest

from nemo_edo.megatron import implementations
from nemo_edo.megatron.implementations import FUSED, fused_kernels, kernels


def test_a_cpu_model_runs_on_torch_and_megatron_alone(policy):
    found = kernels(policy.chunks)
    assert found["norm"] == "torch.nn.modules.normalization.RMSNorm"
    assert found["matrix products"] == "megatron.core.tensor_parallel.layers.RowParallelLinear"
    assert found["optimizer"] == "torch.optim.adamw.AdamW"
    assert found["rotary embedding"] == "torch"
    assert {found[part] for part in FUSED} == {"absent: the device is a CPU"}
    assert not [what for what in found.values() if "transformer_engine" in what or "apex" in what]


def test_what_is_not_installed_is_absent_with_the_reason(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    found = fused_kernels()
    assert found.keys() == FUSED.keys() and "fused_weight_gradient_mlp_cuda" in found["fused weight gradients"]


@pytest.mark.parametrize(("layers", "gradients", "state"), [
    ("megatron.x", True, "1.2"), ("megatron.x", False, "not used by this model's layers (1.2)"),
    ("transformer_engine.x", True, "Transformer Engine's own")])
def test_fused_weight_gradients_are_apexs_in_megatrons_layers_only(monkeypatch, layers, gradients, state):
    monkeypatch.setattr(implementations, "_state", lambda module, package: "1.2")
    assert implementations._fused(gradients, layers, layers)["fused weight gradients"] == state


def test_stand_ins_never_make_megatron_core_believe_in_transformer_engine(policy):
    assert "transformer_engine" not in sys.modules
    assert not sys.modules["megatron.core.extensions.transformer_engine"].HAVE_TE
