"""What a task becomes, by the place that Slurm has given it."""

import json

import pytest

from nemo_edo.cluster import serve, task
from nemo_edo.errors import UserError
from nemo_edo.run import control
from nemo_edo.utils.ranks import variables_of_torchrun

SLURM = {"SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1", "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
         "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "MASTER_ADDR": "n1", "MASTER_PORT": "20001",
         "NEMO_EDO_CONTROL": "/shared/attempt"}


def test_one_task_a_node_becomes_torchrun_of_all_its_processes():
    command = task.torchrun(["train", "seed=1"], 4, SLURM)
    assert command[1:3] == ["-m", "torch.distributed.run"]
    place = {"--nnodes=2", "--node-rank=1", "--nproc-per-node=4", "--master-addr=n1", "--master-port=20001"}
    assert place <= {*command}
    assert command[-4:] == ["-m", "nemo_edo", "train", "seed=1"]


def test_one_task_a_process_finds_the_others_as_torchrun_would_have_it():
    assert variables_of_torchrun(SLURM) == {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}


def test_the_trainer_gets_the_servers_of_all_nodes_once_they_are_ready(tmp_path, monkeypatch):
    monkeypatch.setenv(control.VARIABLE, str(tmp_path))
    (tmp_path / "servers_0.json").write_text(json.dumps(["http://n3:8000", "http://n3:8001"]))
    with pytest.raises(UserError, match="the servers of 1 of 2 nodes are not ready after 0.1 s"):
        serve.overrides_of_servers(2, 0.1)
    (tmp_path / "servers_1.json").write_text(json.dumps(["http://n4:8000"]))
    assert serve.overrides_of_servers(2, 1.0) == [
        'generation.servers.urls=["http://n3:8000", "http://n3:8001", "http://n4:8000"]',
        "generation.servers.api_key_variable=NEMO_EDO_SERVER_KEY", "generation.servers.launched=true"]


def test_a_job_asks_by_a_file_and_the_runs_first_rank_tells_how_it_ended(tmp_path, monkeypatch):
    assert not control.stop_is_asked()  # no job
    monkeypatch.setenv(control.VARIABLE, str(tmp_path))
    assert not control.stop_is_asked()
    (tmp_path / "stop").touch()
    assert control.stop_is_asked()
    monkeypatch.setenv("RANK", "1")
    control.tell_outcome(control.FINISHED)
    assert not (tmp_path / "outcome").exists()
    monkeypatch.setenv("RANK", "0")
    control.tell_outcome(control.FINISHED)
    assert (tmp_path / "outcome").read_text() == "finished\n"
