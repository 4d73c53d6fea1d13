"""``.nemo`` archives of Megatron models, at any split.

An archive holds ``model_config.yaml`` and a Hugging Face folder ``hf/`` with the weights, so it can be restored at
other tensor- and pipeline-parallel sizes than it was saved at, or unpacked and loaded with ``transformers``.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import weakref
from pathlib import Path

import torch
from nemo.core.connectors.save_restore_connector import SaveRestoreConnector
from omegaconf import DictConfig, OmegaConf

from nemo_edo.megatron.hf_export import export_hf_folder


class MegatronSaveRestoreConnector(SaveRestoreConnector):
    """Every rank calls both methods; the archive's folder is staged next to it, on the file system all ranks share."""

    def save_to(self, model, save_path: str) -> None:
        staging = Path(f"{save_path}.staging")
        export_hf_folder(model.built, staging / "hf")
        if torch.distributed.get_rank() == 0:
            config = OmegaConf.create(OmegaConf.to_container(model.cfg))
            config.folder = None  # the archive's own
            OmegaConf.save(config, staging / self.model_config_yaml)
            self._make_nemo_file_from_folder(filename=f"{save_path}.part", source_dir=str(staging))
            Path(f"{save_path}.part").replace(save_path)
            shutil.rmtree(staging)
        torch.distributed.barrier()

    def restore_from(
        self,
        calling_cls,
        restore_path: str,
        override_config_path: DictConfig | str | None = None,
        map_location=None,
        strict: bool = True,
        return_config: bool = False,
        trainer=None,
        validate_access_integrity: bool = True,
    ):
        """``map_location`` and ``strict`` are ModelPT's: the device is the platform's, every weight must be there."""
        from nemo_edo.megatron import platform

        platform.init_process_group(platform.enter())
        with contextlib.ExitStack() as cleanup:
            archive, folder = Path(restore_path), [None]
            if torch.distributed.get_rank() == 0:
                folder = [tempfile.mkdtemp(prefix=f"{archive.name}.", dir=archive.parent)]
                cleanup.callback(shutil.rmtree, folder[0])
                self._unpack_nemo_file(path2file=str(archive), out_folder=folder[0])
            torch.distributed.broadcast_object_list(folder)
            unpacked = Path(folder[0])
            config = OmegaConf.load(unpacked / self.model_config_yaml)
            torch.distributed.barrier()  # every rank has read it
            if override_config_path is not None:
                given = override_config_path
                config = OmegaConf.merge(config, OmegaConf.load(given) if isinstance(given, str) else given)
            if return_config:
                return config
            instance = calling_cls(OmegaConf.merge(config, {"folder": str(unpacked / "hf")}), trainer=trainer)
            torch.distributed.barrier()  # every rank has loaded: the first one's model takes the folder with it
            # An export copies the tokenizer from the folder, so it lasts as long as the model.
            weakref.finalize(instance, cleanup.pop_all().close)
        return instance
