"""The checks of a machine, in their order: a failure explains those below it. A new one is a function and an entry
here; those of a config are in ``checks.doctor``.

``nemo-edo selftest`` runs the checks on every rank, prints a line for each, and writes them into a file
(docs/first_day.md). A Slurm job tries its nodes before its training by some of them, as a step of the job:

    srun ... python -m nemo_edo.checks.selftest --folder SHARED --limit 60 --nodes n1,n2

which exits with status 0 if all nodes are healthy, otherwise with 4. The first process prints a line that begins with
"nemo-edo:" for each fault.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from nemo_edo.checks import machine_checks, numbers
from nemo_edo.checks.installed import ABOUT, installed, versions
from nemo_edo.checks.machine import (
    DOCTOR,
    FAIL,
    IMPOSSIBLE,
    NODES,
    PASS,
    SELFTEST,
    Check,
    CheckError,
    Finding,
    Machine,
    failed,
    forks_use_gpus,
    impossible,
    passed,
    together,
)
from nemo_edo.checks.machine_checks import server_on_another_node, server_run
from nemo_edo.checks.numbers import FASTEST, LONG, MIXTURE, PACKED, QWEN, SameNumbers
from nemo_edo.utils.files import write_text
from nemo_edo.utils.memory import total_bytes
from nemo_edo.utils.ranks import variables_of_torchrun

AMPERE, HOPPER, BLACKWELL = 8.0, 9.0, 10.0  # compute capabilities
RANKS = {"runs_in": (SELFTEST, NODES), "processes": 2, "every_rank": True}
EAGER = "generation.servers.arguments=[--enforce-eager]"
"""The first server has captured graphs: that takes most of its start."""
TO_NCCL = ("generation.refit.transport=nccl", "generation.placement=apart", EAGER)
TWO = ("generation.servers.replicas=2", "generation.servers.tensor_parallel_size=2")
ASLEEP = ("generation.placement=shared", "generation.servers.memory_share=0.4", EAGER)

FP8 = {"remedy": "another recipe (precision.fp8_recipe), or bf16; docs/scaling.md has what each needs"}
ATTENTION = {"remedy": "set model.attention to one that passes"}
PACKING = {"remedy": "train with packing=false, and report the versions of Transformer Engine and its attention "
                     "kernels"}  # fmt: skip
SPLIT = {
    "processes": 2,
    "every_rank": True,
    "remedy": "another split of the ranks; the all-reduce above tells whether they can reach each other",
}
CONTEXT = {**SPLIT, "te": AMPERE}
TRAINING = {"every_rank": True, "remedy": "see the splits above"}

CHECKS = [
    Check("machine", "versions", runs_in=(DOCTOR,),
          run=lambda machine: passed(", ".join(f"{name} {installed(name) or 'absent'}" for name in ABOUT))),
    Check("machine", "packages", machine_checks.packages, (DOCTOR, SELFTEST)),
    Check("machine", "GPU", machine_checks.driver, (DOCTOR,)),
    Check("machine", "memory", lambda machine: passed(f"{total_bytes() / 1e9:.1f} GB of the host"), (DOCTOR,)),
    Check("machine", "same on all ranks", machine_checks.same_on_all_ranks, **RANKS,
          remedy="start every rank in the same image or environment, on nodes of the same kind"),
    Check("machine", "GPUs", machine_checks.gpus, (SELFTEST, NODES), every_rank=True,
          remedy="install a torch that is built for CUDA and for this driver, and see to CUDA_VISIBLE_DEVICES"),
    Check("machine", "Transformer Engine", machine_checks.transformer_engine,
          remedy="pip install 'transformer-engine[pytorch]' as the Dockerfile does; without it there is no FP8, no "
                 "context parallelism, and torch's attention"),
    Check("machine", "NCCL of trainer and servers", machine_checks.nccl,
          remedy="reinstall nvidia-nccl in the servers' environment; docs/servers.md"),
    Check("machine", "connections", machine_checks.connections, **RANKS, remedy="open all ports between the nodes"),
    Check("machine", "clocks", machine_checks.clocks, **RANKS,
          remedy="synchronise them (NTP): the times of files and log lines mislead"),
    Check("machine", "shared folder", machine_checks.shared_folder, (SELFTEST, NODES), every_rank=True,
          remedy="name a folder that every node can write to: --folder"),
    Check("machine", "all-reduce", machine_checks.all_reduce, **RANKS,
          remedy="run with NCCL_DEBUG=INFO (GPUs) and see which interface is taken; NCCL_SOCKET_IFNAME, "
                 "GLOO_SOCKET_IFNAME"),
    Check("precision", "fp32 products", numbers.products, gpu=True,
          remedy="start every process with NVIDIA_TF32_OVERRIDE=0 in its environment"),
    Check("precision", "fp32, as transformers", numbers.against_transformers,
          remedy="compare the versions with those that nemo-edo doctor expects: nothing below can be trusted"),
    Check("precision", "grouped queries, biases, tied head", partial(numbers.against_transformers, model=QWEN),
          remedy="train a model without them, and report the versions of Transformer Engine and Megatron-Bridge"),
    Check("precision", "tf32", SameNumbers("tf32"), gpu=True, remedy="train with precision.tf32=false"),
    Check("precision", "bf16", SameNumbers("bf16"), remedy="train in fp32"),
    Check("precision", "fp8, tensorwise", SameNumbers("fp8 tensorwise"), te=HOPPER, **FP8),
    Check("precision", "fp8, delayed", SameNumbers("fp8 delayed"), te=HOPPER, **FP8),
    Check("precision", "fp8, blockwise", SameNumbers("fp8 blockwise"), te=HOPPER, **FP8),
    Check("precision", "fp8, mxfp8", SameNumbers("fp8 mxfp8"), te=BLACKWELL, **FP8),
    Check("attention", "torch's", SameNumbers(attention="sdpa"), **ATTENTION),
    Check("attention", "Megatron's", SameNumbers(attention="local"), **ATTENTION),
    Check("attention", "Transformer Engine's", SameNumbers("bf16", attention="te"), te=AMPERE, **ATTENTION),
    # In bf16 on GPUs: Transformer Engine packs in no other precision.
    Check("attention", "packing", SameNumbers(FASTEST, training=PACKED), **PACKING),
    Check("attention", "shared prompts",
          SameNumbers(FASTEST, attention="sdpa", training={**PACKED, "share_prompts": True}), **PACKING),
    Check("attention", "long sequences", SameNumbers(FASTEST, length=LONG), gpu=True, **ATTENTION),
    Check("attention", "fused loss head", SameNumbers(loss_head="fused"), remedy="set model.loss_head=logits"),
    Check("attention", "fused loss kernels", SameNumbers(loss_head="fused", tile=128), gpu=True,
          remedy="update triton and the driver; until it passes, set model.loss_head=logits and report the versions"),
    Check("attention", "token by token", numbers.token_by_token,
          remedy="set model.attention to one that passes above, or generate with servers (generation=vllm)"),
    Check("split", "data", SameNumbers(parallelism={"use_distributed_optimizer": True}, world=True), **SPLIT),
    Check("split", "tensor", SameNumbers(split="tensor"), **SPLIT),
    Check("split", "tensor, with the sequence",
          SameNumbers(split="tensor", parallelism={"sequence_parallel": True}), **SPLIT),
    Check("split", "pipeline", SameNumbers(split="pipeline", at_most=4), **SPLIT),
    Check("split", "tensor and pipeline, tied head",
          SameNumbers(split="pipeline", at_most=2, model=QWEN, parallelism={"tensor_model_parallel_size": 2}),
          **{**SPLIT, "processes": 4}),
    Check("split", "context", SameNumbers("bf16", split="context"), **CONTEXT),
    Check("split", "context, grouped queries", SameNumbers("bf16", split="context", model=QWEN), **CONTEXT),
    Check("split", "context, packed", SameNumbers("bf16", split="context", model=QWEN, training=PACKED), **CONTEXT),
    Check("split", "experts", SameNumbers(split="expert", model=MIXTURE), **SPLIT),
    Check("training", "ED-GRPO step", SameNumbers(world=True), **TRAINING),
    Check("training", "ED-iDPO step", SameNumbers(algorithm="idpo", world=True), **TRAINING),
    Check("training", "checkpoint at another layout", numbers.checkpoint_at_another_layout, every_rank=True,
          remedy="see that every node can write to and read the folder (--folder), and that it is not full"),
    Check("training", "memory of a resume", numbers.memory_of_a_resume, gpu=True, processes=2, every_rank=True,
          remedy="start fewer processes on a node, or set checkpoint.reshardable=false, and report the figures"),
    Check("training", "speed", numbers.speed,
          remedy="the other checks say what does not work; without any, memory may be short"),
    Check("server", "vLLM, refit by disk", server_run, spare_gpus=1, every_rank=True),
    Check("server", "vLLM, refit by NCCL", lambda machine: server_run(machine, *TO_NCCL), gpu=True, spare_gpus=1,
          every_rank=True),
    Check("server", "two vLLM servers over two GPUs each, refit by NCCL",
          lambda machine: server_run(machine, *TO_NCCL, *TWO), gpu=True, spare_gpus=4, every_rank=True),
    Check("server", "vLLM on another node, refit by disk", server_on_another_node, nodes=2, spare_gpus=1,
          every_rank=True),
    Check("server", "vLLM, asleep during training", lambda machine: server_run(machine, *ASLEEP), gpu=True,
          every_rank=True),
]  # fmt: skip

# --- how they are run -------------------------------------------------------------------------------------------------

WIDTH = 42
WAIT_S = 600.0  # how long a rank waits for others, whose checks may hang until their limits
IMPORTS_LIMIT_S = 120.0
UNHEALTHY = 4
START_LIMIT_S = 300.0  # for the last process of a job to start: a node may have to load the container's image


def selftest(folder: Path, groups: Sequence[str] = ()) -> bool:
    """Returns whether no check has failed on any rank. Every rank of a torchrun calls this; the first one prints and
    writes ``folder/selftest.json``. groups: the values of ``Check.group`` to run; none: all."""
    chosen = [check for check in CHECKS if SELFTEST in check.runs_in and (not groups or check.group in groups)]
    machine, begin = Machine.of_ranks(folder.absolute(), limit_s=WAIT_S), time.monotonic()
    machine = prepared(machine, chosen)
    if machine.rank == 0:
        count = f"{len(chosen)} checks, {machine.world} processes"
        print(f"nemo-edo selftest: {count}, GPUs: {len(machine.gpus) or 'none'}")
    findings: list[tuple[Check, Finding]] = []
    for check in chosen:
        finding = carried_out(check, machine)
        findings.append((check, finding))
        if machine.rank == 0:
            text = f"{finding.detail}\ndo: {finding.remedy}" if finding.remedy else finding.detail
            indented = text.replace("\n", f"\n{'':14}")
            print(f"{finding.status:13} {f'{check.group}: {check.name}':{WIDTH}} {indented}", flush=True)
        if None in machine.facts:  # the first check has named the ranks; without them the others would wait
            break
    machine.leave()
    good = all(finding.status != FAIL for _, finding in findings)
    if good:  # otherwise the messages name logs in it
        shutil.rmtree(machine.scratch)
    if machine.rank > 0:  # whose failure torchrun would answer by ending the first rank, which has yet to write
        return True
    seconds = time.monotonic() - begin
    report = {
        "seconds": seconds,
        "processes": machine.world,
        "gpus": [gpu.name for gpu in machine.gpus],
        "versions": versions(),
        "checks": [{"group": check.group, "name": check.name, **asdict(finding)} for check, finding in findings],
    }
    path = machine.folder / "selftest.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(report, indent=2))
        written = f"; {path}"
    except OSError as error:  # the check of the folder has said what to do
        written = f"; no selftest.json: {error.strerror}"
    counts = Counter(finding.status for _, finding in findings)
    print(f"{', '.join(f'{counts[s]} {s}' for s in (PASS, FAIL, IMPOSSIBLE))} in {seconds:.0f} s{written}")
    return good


def prepared(machine: Machine, chosen: Sequence[Check]) -> Machine:
    """The machine with what the checks need, once for all of them: models, and imports for processes that are forked,
    each of which would otherwise take longer to start than to compute."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if all(check.group == "machine" for check in chosen):  # they need no model
        return machine
    if machine.gpus:
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # otherwise is_available() spoils a fork
        try:  # in another process first: an import may crash
            forks = replace(machine, check="forks").run(forks_use_gpus, limit_s=IMPORTS_LIMIT_S)
        except CheckError:
            forks = False
        machine = replace(machine, forks=forks)
    if machine.forks:
        import nemo_edo.models  # noqa: F401
    for name in numbers.MODELS:
        numbers.write_model(machine.scratch / name)
    return machine


def carried_out(check: Check, machine: Machine) -> Finding:
    """The finding of all ranks, each of which calls this."""
    machine = replace(machine, check=check.name)
    if why := check.lacking(machine):
        finding = impossible(why)
    elif machine.rank > 0 and not check.every_rank:
        finding = impossible("it runs on rank 0")
    else:
        try:
            finding = check.run(machine)
        except CheckError as error:
            finding = failed(str(error))
    if finding.status == FAIL and not finding.remedy:
        finding = replace(finding, remedy=check.remedy)
    answers = [answer and Finding(**answer) for answer in machine.exchange("finding", asdict(finding))]
    if not check.every_rank:
        return answers[0]
    # The first check names the ranks that have not reported.
    reported = {rank: answer for rank, answer in enumerate(answers) if machine.facts[rank] is not None}
    return together(reported, machine.named)


def check_nodes() -> int:
    from torch.distributed import DistError

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="shared by all nodes")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for all of it")
    parser.add_argument("--start-limit", type=float, default=START_LIMIT_S, help="seconds for the last rank to start")
    parser.add_argument("--gpus", type=int, default=0, help="of each node, at least")
    parser.add_argument("--nodes", default="", help="the nodes' names in the order of their ranks")
    args = parser.parse_args()
    os.environ.update(variables_of_torchrun(os.environ))
    nodes, begin = tuple(filter(None, args.nodes.split(","))), time.monotonic()
    faults: list[str] = []
    try:
        # Half of it for a rank that stops answering: the check ends with that. Containers start at different times.
        machine = Machine.of_ranks(args.folder, limit_s=args.limit / 2, nodes=nodes, start_limit_s=args.start_limit)
        machine = replace(machine, gpus_expected=args.gpus)
        for check in [check for check in CHECKS if NODES in check.runs_in]:
            finding = carried_out(check, machine)
            if finding.status == FAIL:  # the checks after it would wait for the ranks at fault
                faults = finding.detail.splitlines()
                break
            if machine.rank == 0 and finding.status == PASS:
                print(f"nemo-edo: {check.name}: {finding.detail}")
        machine.leave()
    except DistError as error:
        rank, place = os.environ["RANK"], f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        what = "cannot listen on" if rank == "0" else "cannot reach the first process at"
        print(f"nemo-edo: rank {rank} {what} {place}: {str(error).splitlines()[0][:200]}")
        return UNHEALTHY
    if machine.rank == 0:
        verdict = f"{len(faults)} faults" if faults else "all healthy"
        faults.append(f"{machine.world} processes checked in {time.monotonic() - begin:.1f} s: {verdict}")
        print(*(f"nemo-edo: {line}" for line in faults), sep="\n", flush=True)
    if finding.status == FAIL:
        return UNHEALTHY
    shutil.rmtree(machine.scratch)
    return 0


if __name__ == "__main__":
    sys.exit(check_nodes())
