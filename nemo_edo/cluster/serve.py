"""Generation servers on the server nodes of a job, and how the trainer's tasks find them.

Each node's task starts ``generation.servers.replicas`` servers, and writes their URLs to the attempt's folder once they
are ready. The job's script makes their key, and sets it in the environment of servers and trainers.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import replace
from pathlib import Path

from nemo_edo.config.compose import compose_run
from nemo_edo.errors import UserError
from nemo_edo.run.control import control_folder
from nemo_edo.utils.files import replacing
from nemo_edo.utils.ranks import first_that_resolves

KEY = "NEMO_EDO_SERVER_KEY"
"""The environment variable with the servers' key."""
POLL_EVERY_S = 0.5


def serve(config_name: str, config_dir: str) -> None:
    """Starts this node's servers and watches them. Raises UserError once one of them has ended."""
    import torch

    from nemo_edo.generation import servers
    from nemo_edo.run.folder import RunFolder
    from nemo_edo.run.inputs import model_folder, seq_length, write_builtin_files

    attempt, node = control_folder(), os.environ["SLURM_PROCID"]
    cfg = compose_run(config_name, [], config_dir)
    # The trainer is on other nodes.
    listening = replace(cfg.generation.servers, host="0.0.0.0")
    cfg = replace(cfg, generation=replace(cfg.generation, servers=listening))
    own = RunFolder(attempt / f"server_node_{node}")
    if cfg.model.path is None:  # the first refit sends the trainer's weights
        write_builtin_files(cfg, own)
    cfg = replace(cfg, model=replace(cfg.model, seq_length=seq_length(cfg)))
    gpus = torch.cuda.device_count()
    servers.check_servers(cfg, gpus)
    replicas = servers.build_replicas(cfg, model_folder(cfg, own), own.path, gpus, key=os.environ[KEY])
    servers.start(replicas, cfg.model.seq_length)
    address = first_that_resolves(os.environ.get("SLURMD_NODENAME", ""), socket.gethostname())
    urls = [f"http://{address}:{replica.url.rpartition(':')[2]}" for replica in replicas]
    with replacing(_urls(attempt, node)) as file:
        file.write(json.dumps(urls).encode())
    while True:
        for replica in replicas:
            if replica.has_ended:
                raise UserError(f"{replica}: {replica.ending()}")
        time.sleep(POLL_EVERY_S)


def overrides_of_servers(nodes: int, limit_s: float) -> list[str]:
    """The trainer's overrides with the servers' URLs, once the servers of all ``nodes`` nodes are ready. Raises
    UserError after the limit."""
    attempt, deadline = control_folder(), time.monotonic() + limit_s
    paths = [_urls(attempt, str(node)) for node in range(nodes)]
    while missing := [path for path in paths if not path.is_file()]:
        if time.monotonic() > deadline:
            raise UserError(f"the servers of {len(missing)} of {nodes} nodes are not ready after {limit_s:g} s")
        time.sleep(POLL_EVERY_S)
    urls = [url for path in paths for url in json.loads(path.read_text(encoding="utf-8"))]
    section = "generation.servers"
    return [f"{section}.urls={json.dumps(urls)}", f"{section}.api_key_variable={KEY}", f"{section}.launched=true"]


def _urls(attempt: Path, node: str) -> Path:
    return attempt / f"servers_{node}.json"
