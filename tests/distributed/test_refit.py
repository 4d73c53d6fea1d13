"""Refits by two processes: whatever the split, the server gets whole weights."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import nccl_stub, scripted_server, tiny_models
from helpers.controller import build_tiny, controlled
from safetensors.torch import load_file

from nemo_edo.refit.disk import DiskSync, WeightFolders
from nemo_edo.refit.libnccl import Library
from nemo_edo.refit.nccl import NCCLSync
from nemo_edo.worker.dispatch import Workers
from nemo_edo.worker.worker import Worker

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def exported(worker: Worker) -> dict:
    return tiny_models.exported(worker.model.policy)


def bytes_on_host(worker: Worker, folder: Path) -> int:
    """What this rank copies to its host while a folder of weights is written."""
    copied = []
    with mock.patch.object(torch.Tensor, "cpu", lambda tensor: copied.append(tensor) or tensor):
        worker.export(folder, 2**30, True)
    return sum(tensor.nbytes for tensor in copied if tensor.is_floating_point())  # the others are pickled names


def through_a_folder(workers: Workers, folder: Path) -> dict:
    server = scripted_server.ScriptedReplica()
    sync = DiskSync(scripted_server.engine_of(server), WeightFolders(folder, workers, 1), attempts=1, limit_s=5.0)
    sync.push(1)  # its folder goes with it
    return load_file(Path(server.weights) / "model.safetensors")


def by_broadcasts(workers: Workers, folder: Path) -> dict:
    library = Library(nccl_stub.build(folder))
    server = scripted_server.ScriptedReplica(faults={"/update_weights": 1})  # the second attempt goes through
    server.link = nccl_stub.Workers(library, 60.0)
    sync = NCCLSync(scripted_server.engine_of(server), workers, lambda: nccl_stub.communicator(library, 60.0),
                    name="run", attempts=2, limit_s=60.0, bucket_bytes=16_000)
    sync.push(1)
    return dict(server.received)


def refits(model: Path, folder: Path, sizes: dict) -> dict | None:
    def call(workers: Workers) -> dict:
        workers.call(build_tiny, model, sizes)
        expected = workers.call(exported)[0]
        nccl = by_broadcasts(workers, folder.parent)
        copied = workers.call(bytes_on_host, folder.parent)
        return {"disk": through_a_folder(workers, folder), "nccl": nccl, "expected": expected, "copied": copied}

    return controlled(call)


LAYOUTS = {"tensor": {"tensor_model_parallel_size": 2}, "pipeline": {"pipeline_model_parallel_size": 2}}


@pytest.fixture(scope="module", params=LAYOUTS)
def found(request, two, tiny_model, tmp_path_factory) -> dict:
    folder, sizes = tmp_path_factory.mktemp("refit"), LAYOUTS[request.param]
    return two.run("distributed.test_refit:refits", model=tiny_model, folder=folder, sizes=sizes)[0]


def test_a_server_gets_the_whole_weights_of_a_split_model_which_only_the_first_rank_copies(found):
    expected = found["expected"]
    for transport in ("disk", "nccl"):
        weights = found[transport]
        assert weights.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []
    assert found["copied"] == [sum(weight.nbytes for weight in expected.values()), 0]
