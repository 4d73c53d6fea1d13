import gc
import io
import tarfile

import pytest
import torch
from helpers.tiny_models import step
from omegaconf import OmegaConf, errors
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_edo.config import GRPOConfig, IDPOConfig, OptimizerConfig, SFTConfig
from nemo_edo.models import MegatronGPTDPOModel, MegatronGPTGRPOModel, MegatronGPTSFTModel
from nemo_edo.models.megatron_gpt_model import MegatronSaveRestoreConnector

OPTIMIZER = OptimizerConfig(lr=2e-3)
CONFIGS = {
    MegatronGPTSFTModel: SFTConfig(micro_batch_size=2, optimizer=OPTIMIZER),
    MegatronGPTGRPOModel: GRPOConfig(micro_batch_size=2, optimizer=OPTIMIZER, alpha=0.25, clip_high=0.28),
    MegatronGPTDPOModel: IDPOConfig(micro_batch_size=2, optimizer=OPTIMIZER, alpha=0.25, length_normalized=True),
}


@pytest.fixture(scope="module", params=CONFIGS, ids=lambda model_class: model_class.__name__)
def model(request, make_model, pairs):
    """Trained a step, so that its weights are no longer those of its folder."""
    model = make_model(CONFIGS[request.param])
    model.start_training(1)
    step(model, pairs)
    return model


@pytest.fixture(scope="module")
def archive(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("archive") / "model.nemo"
    model.save_to(str(path))
    return path


def files_next_to(archive) -> list[str]:
    """Once models that nothing refers to any more are gone."""
    gc.collect()
    return [path.name for path in archive.parent.iterdir()]


def assert_same_weights(tiny, found, expected) -> None:
    weights, wanted = tiny.exported(found.policy), tiny.exported(expected.policy)
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


def test_a_restored_model_has_class_config_and_weights_to_the_last_bit_and_can_be_saved_again_and_trained(
    model, archive, pairs, tiny, tmp_path
):
    restored = type(model).restore_from(str(archive))
    assert type(restored) is type(model)
    assert restored.settings == model.settings == CONFIGS[type(model)]
    assert restored.temperature == model.temperature
    assert_same_weights(tiny, restored, model)
    restored.save_to(str(tmp_path / "again.nemo"))
    assert_same_weights(tiny, type(model).restore_from(str(tmp_path / "again.nemo")), model)
    restored.start_training(1)
    assert step(restored, pairs)["grad_norm"] > 0


def test_the_archive_holds_a_config_and_a_folder_that_transformers_loads(model, archive, tiny, tmp_path):
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    config = OmegaConf.load(tmp_path / "model_config.yaml")
    assert config.folder is None, "a path of this machine means nothing to whoever restores it"
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    expected = tiny.exported(model.policy)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").eos_token_id == 1


def test_a_restored_model_that_is_gone_and_a_restore_that_fails_leave_nothing_next_to_the_archive(model, archive):
    restored = type(model).restore_from(str(archive))
    assert len(files_next_to(archive)) == 2
    del restored
    assert files_next_to(archive) == ["model.nemo"]
    override = OmegaConf.create({"training": {"alhpa": 1}})
    with pytest.raises(errors.ConfigKeyError, match="alhpa"):
        type(model).restore_from(str(archive), override_config_path=override)
    assert files_next_to(archive) == ["model.nemo"]


def test_return_config_gives_the_config_alone_and_an_override_replaces_its_values(model, archive):
    config = type(model).restore_from(str(archive), return_config=True)
    assert OmegaConf.to_container(config.training) == OmegaConf.to_container(model.cfg.training)
    assert files_next_to(archive) == ["model.nemo"]
    override = OmegaConf.create({"training": {"micro_batch_size": 6}})
    restored = type(model).restore_from(str(archive), override_config_path=override)
    assert restored.settings.micro_batch_size == 6
    assert restored.settings.optimizer == model.settings.optimizer


def test_an_archive_writes_nothing_outside_its_folder(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "secret").write_text("untouched")
    with tarfile.open(tmp_path / "foreign.nemo", "w") as tar:
        for name in ("good", "../secret", f"{tmp_path}/secret", "hf/../../secret"):
            member = tarfile.TarInfo(name)
            member.size = 3
            tar.addfile(member, io.BytesIO(b"new"))
        for name, kind in (("soft", tarfile.SYMTYPE), ("hard", tarfile.LNKTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "../secret"
            tar.addfile(member)
    MegatronSaveRestoreConnector._unpack_nemo_file(str(tmp_path / "foreign.nemo"), str(tmp_path / "out"))
    assert (tmp_path / "secret").read_text() == "untouched"
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["good"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["foreign.nemo", "out", "secret"]
