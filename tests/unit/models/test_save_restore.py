import gc
import io
import tarfile

import pytest
import torch
from helpers.tiny_models import step
from omegaconf import OmegaConf, errors

from nemo_edo.models.megatron_gpt_model import MegatronSaveRestoreConnector


@pytest.fixture(scope="module")
def model(make_model, training, pairs):
    """Trained a step, so that its weights are no longer those of its folder."""
    model = make_model(training)
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
    model, archive, training, pairs, tiny, tmp_path
):
    restored = type(model).restore_from(str(archive))
    assert type(restored) is type(model)
    assert restored.settings == model.settings == training
    assert restored.temperature == model.temperature
    assert_same_weights(tiny, restored, model)
    restored.save_to(str(tmp_path / "again.nemo"))
    assert_same_weights(tiny, type(model).restore_from(str(tmp_path / "again.nemo")), model)
    restored.start_training(1)
    assert step(restored, pairs)["grad_norm"] > 0


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
    assert config.folder is None, "a path of this machine means nothing to whoever restores it"
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
