"""What a process is told about its machine's GPUs before it trains."""

import pytest
import torch

from nemo_edo.errors import UserError
from nemo_edo.megatron.platform import require_no_unused_gpu


def test_a_gpu_that_torch_cannot_use_is_no_reason_to_train_on_the_cpu(tmp_path, monkeypatch):
    driver = tmp_path / "nvidiactl"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    require_no_unused_gpu(driver)
    driver.touch()
    with pytest.raises(UserError, match="CUDA 13.0.*CUDA_VISIBLE_DEVICES="):
        require_no_unused_gpu(driver)
    monkeypatch.setattr(torch.version, "cuda", None)  # a torch for CPUs was chosen
    require_no_unused_gpu(driver)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    require_no_unused_gpu(driver)
