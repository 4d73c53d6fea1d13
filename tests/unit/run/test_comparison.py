"""A model that Megatron computes as transformers does passes the comparison; one that differs by 0.05 nats does not."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nemo_edo.config import MicroBatchConfig, ParallelismConfig, PrecisionConfig
from nemo_edo.config.compose import compose_run
from nemo_edo.data import model_folder
from nemo_edo.errors import UserError
from nemo_edo.run import comparison
from nemo_edo.run.build import Builder
from nemo_edo.run.comparison import logprobs
from nemo_edo.run_folder import RunFolder

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
IDS = comparison.tokens(130, 64)


def megatrons(tiny, folder, dtype):
    policy = tiny.build_policy(folder, dtype=dtype)
    return tiny.logprobs(policy, comparison.batch(IDS), micro_batching=MicroBatchConfig(2), temperature=1.0)[0]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("kind", "fields"), [("llama", {}), ("qwen3", {}), ("qwen3_moe", EXPERTS)])
def test_rounding_passes_and_another_rotary_base_does_not(tiny, tmp_path, kind, fields, dtype):
    folder = tiny.write_tiny_model(tmp_path, kind, num_hidden_layers=4, **fields)
    dense = tiny.load_dense(folder)
    exact = logprobs(dense, IDS)
    dense.model.rotary_emb.inv_freq *= 0.9
    other = logprobs(dense, IDS)
    assert (other - exact).abs().max() > 0.05
    dense.model.rotary_emb.inv_freq /= 0.9
    both, precision = torch.stack([exact, logprobs(dense.bfloat16(), IDS)]), PrecisionConfig(dtype)
    value, most = comparison.deviation(megatrons(tiny, folder, dtype), both, precision, 4)
    assert value < most / 2
    value, most = comparison.deviation(other, both, precision, 4)
    assert value > most


@pytest.mark.slow
def test_a_model_without_room_is_compared_by_its_first_and_last_layers(tiny, tmp_path, monkeypatch):
    source, scratch = tmp_path / "model", tmp_path / "scratch"
    tiny.write_tiny_model(source, "qwen3_moe", num_hidden_layers=7, mlp_only_layers=[0, 5], **EXPERTS)
    monkeypatch.setattr(comparison, "MOST_BYTES", 0)
    scratch.mkdir()
    begun = comparison.FolderComparison(source, PrecisionConfig(), ParallelismConfig(), 128, scratch)

    def policy(far: float) -> SimpleNamespace:
        dense = tiny.load_dense(begun.folder)
        return SimpleNamespace(logprobs=lambda batch, temperature: (logprobs(dense, batch.tokens) + far, None))

    found = begun.finish(policy(0.0))
    assert found["layers"] == [0, 1, 5, 6] and found["nats"] < 1e-4
    fields = json.loads((begun.folder / "config.json").read_text())
    assert (fields["num_hidden_layers"], fields["mlp_only_layers"]) == (4, [0, 2])
    with pytest.raises(UserError, match=r"0\.05 nats at most.*model\.verify=false"):
        begun.finish(policy(0.05))
    begun.close()
    assert not scratch.exists()


def test_a_truncated_copy_divides_over_the_stages(tiny, tmp_path):
    tiny.write_tiny_model(tmp_path / "model", num_hidden_layers=12)
    assert model_folder.write_truncated(tmp_path / "model", tmp_path / "out", 3) == [0, 1, 2, 9, 10, 11]


def test_a_run_compares_once_and_only_a_model_that_it_reads(tiny, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("nemo_edo.run.build.FolderComparison", lambda *given: asked.append(given))
    path, run = tiny.write_tiny_model(tmp_path / "model"), RunFolder(tmp_path)
    cfg = compose_run("quickstart", [f"model.path={path}", "model.architecture=null"])
    own = replace(cfg.model, path=None, architecture={"model_type": "llama"})
    for model in (own, replace(cfg.model, verify=False), cfg.model):
        Builder(replace(cfg, model=model), run).begin_comparison()
    run.write_json(comparison.RECORD, {})
    Builder(cfg, run).begin_comparison()
    assert [given[0] for given in asked] == [path]
