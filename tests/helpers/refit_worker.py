"""A real vLLM server that is given other weights again and again, on the quickstart's model with OVERRIDES. Writes
FOLDER/results.json for tests/servers/test_refit.py."""

import json
import sys
import threading
import time
from pathlib import Path

import psutil
import torch

from nemo_edo.algorithms.requests import sampling_requests
from nemo_edo.config.compose import compose_run
from nemo_edo.data.batching import build_batch
from nemo_edo.errors import UserError
from nemo_edo.megatron.process_groups import device_and_groups
from nemo_edo.run import build, inputs
from nemo_edo.run.folder import RunFolder
from nemo_edo.types import SamplingParams

SAMPLED, GREEDY = SamplingParams(1.0, 1.0, 32), SamplingParams(0.0, 1.0, 32)
PUSHES = 4


def move(model, seed: int) -> None:
    """To weights that answer otherwise."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.workers.local.model.built.chunks[0].parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def largest_gap(model, rollouts, data) -> float:
    """Of the servers' log-probabilities to the trainer's."""
    batch = build_batch([(r.prompt_ids, r.response_ids) for r in rollouts], pad_id=data.pad_id,
                        sampler_logprobs=[r.response_logprobs for r in rollouts])
    logprobs, _ = model.logprobs(batch)
    return float((logprobs - batch.sampler_logprobs).abs()[batch.mask != 0].max())


def pushes(model, in_process, servers, sync, data) -> list[dict]:
    """After each push: how long it took, and both engines' responses."""
    greedy = sampling_requests(data.train[:200], data.prompts, 1, 1, "greedy")
    sampled = sampling_requests(data.train[:64], data.prompts, 4, 1, "sampled")
    done = []
    for version in range(PUSHES):
        move(model, version)
        begun = time.monotonic()
        sync.push(version)
        seconds = time.monotonic() - begun
        texts = [[r.text for r in engine.generate(greedy, GREEDY)] for engine in (in_process, servers)]
        rollouts = servers.generate(sampled, SAMPLED)
        done.append({
            "seconds": seconds,
            "greedy_same": sum(one == other for one, other in zip(*texts, strict=True)),
            "greedy": texts[1],
            "versions": sorted({r.policy_version for r in rollouts}),
            "largest_gap": largest_gap(model, rollouts, data),
            "folders": sorted(folder.name for folder in servers.replicas[0].model_folder.parent.iterdir()),
        })  # fmt: skip
    return done


def killed(model, servers, data) -> dict:
    """A server that dies while it answers comes back with the weights of the last push."""
    replica = servers.replicas[0]
    [process] = psutil.Process(replica.process.pid).children()
    starts = replica.starts
    threading.Timer(0.3, process.kill).start()
    asked = sampling_requests(data.train[:100], data.prompts, 10, 2, "killed")
    rollouts = servers.generate(asked, SAMPLED)
    rollouts += servers.generate(asked[:200], SAMPLED)  # by the new process, if the first were all answered before
    return {"starts": replica.starts - starts, "samples": len(rollouts),
            "largest_gap": largest_gap(model, rollouts, data)}


def tampered(servers, data, base: Path) -> str:
    """Somebody gives the server other weights: what the next responses are met with."""
    replica = servers.replicas[0]
    replica.request("POST", "/collective_rpc", json={"method": "reload_policy", "kwargs": {"weights_path": str(base)}})
    replica.request("POST", "/update_weight_version", json={"new_version": "somebody's"})
    try:
        servers.generate(sampling_requests(data.train[:4], data.prompts, 1, 3, "tampered"), SAMPLED)
    except UserError as error:
        return str(error)
    return "nothing"


def prepared(folder: Path, *overrides: str):
    """The quickstart's config with vLLM and OVERRIDES, its run folder, data, model, and the engine in this process."""
    cfg = compose_run("quickstart", [f"output_dir={folder}", "name=run", "generation=vllm", "~arms",
                                     "replicate_baseline=false", *overrides])  # fmt: skip
    run = RunFolder(folder / "run")
    run.data.mkdir(parents=True)
    device_and_groups(cfg.parallelism, cfg.seed, 1)
    inputs.write_builtin_files(cfg, run)
    data, model = inputs.load_data(cfg, run), build.build_model(cfg, run, cfg.grpo)
    return cfg, run, data, model, build.build_engine(compose_run("quickstart", ["~arms"]), model, data, None)


def main(folder: Path, overrides: list[str]) -> None:
    cfg, run, data, model, in_process = prepared(folder, *overrides)
    servers = build.start_servers(cfg, run, data)
    try:
        sync = build.build_weight_sync(cfg, run, model, servers)
        results = {
            "pushes": pushes(model, in_process, servers, sync, data),
            "killed": killed(model, servers, data),
            "tampered": tampered(servers, data, run.base),
        }
        begun = time.monotonic()
        sync.push(PUSHES - 1)
        results["again_s"] = time.monotonic() - begun
    finally:
        servers.close()
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
