"""All checks, in their order: a failure explains those below it."""

from __future__ import annotations

from nemo_edo.checks import config_checks, nodes, numbers, software, speed
from nemo_edo.checks.findings import Check, RunsIn
from nemo_edo.checks.nodes import several
from nemo_edo.checks.numbers import PACKED, SameNumbers, a_gpu, a_spare_gpu, te_on
from nemo_edo.checks.server_check import ServerRun
from nemo_edo.checks.tiny_model import FASTEST, MIXTURE, Setting

DOCTOR, CONFIG, SELFTEST, NODES = RunsIn
RANKS = {"runs_in": SELFTEST | NODES, "needs": several, "every_rank": True}
SPLIT = {"needs": several, "every_rank": True}
HOPPER, BLACKWELL = te_on(9.0), te_on(10.0)
EAGER = "generation.servers.arguments=[--enforce-eager]"
"""The first server has captured graphs: that takes most of its start."""
TO_NCCL = ("generation.refit.transport=nccl", "generation.placement=apart", EAGER)
ASLEEP = ("generation.placement=shared", "generation.servers.memory_share=0.4", EAGER)

CHECKS = [
    Check("machine", "versions", software.versions, DOCTOR),
    Check("machine", "packages", software.packages, DOCTOR | SELFTEST),
    Check("machine", "GPU", software.driver, DOCTOR),
    Check("machine", "memory", software.memory, DOCTOR),
    Check("config", "to be given", config_checks.to_be_given, CONFIG),
    Check("config", "model", config_checks.model, CONFIG),
    Check("config", "sequences", config_checks.sequences, CONFIG),
    Check("config", "generation", config_checks.generation, CONFIG),
    Check("config", "fullest in", config_checks.needs, CONFIG),
    Check("config", "fits", config_checks.fits, CONFIG),
    Check("config", "time", config_checks.time, CONFIG),
    Check("config", "servers", config_checks.servers, CONFIG),
    Check("config", "end tokens", config_checks.end_tokens, CONFIG),
    Check("config", "disk", config_checks.disk, CONFIG),
    Check("machine", "same on all ranks", nodes.same_on_all_ranks, **RANKS),
    Check("machine", "GPUs", software.gpus, SELFTEST | NODES, every_rank=True),
    Check("machine", "Transformer Engine", software.transformer_engine),
    Check("machine", "NCCL of trainer and servers", software.nccl),
    Check("machine", "connections", nodes.connections, **RANKS),
    Check("machine", "clocks", nodes.clocks, **RANKS),
    Check("machine", "shared folder", nodes.shared_folder, SELFTEST | NODES, every_rank=True),
    Check("machine", "all-reduce", nodes.all_reduce, **RANKS),
    Check("precision", "fp32, as transformers", numbers.against_transformers),
    Check("precision", "bf16", SameNumbers(Setting("bf16"))),
    Check("precision", "fp8, tensorwise", SameNumbers(Setting("fp8 tensorwise")), needs=HOPPER),
    Check("precision", "fp8, delayed", SameNumbers(Setting("fp8 delayed")), needs=HOPPER),
    Check("precision", "fp8, blockwise", SameNumbers(Setting("fp8 blockwise")), needs=HOPPER),
    Check("precision", "fp8, mxfp8", SameNumbers(Setting("fp8 mxfp8")), needs=BLACKWELL),
    Check("attention", "torch's", SameNumbers(Setting(attention="sdpa"))),
    Check("attention", "Megatron's", SameNumbers(Setting(attention="local"))),
    Check("attention", "Transformer Engine's", SameNumbers(Setting("bf16", attention="te")), needs=te_on()),
    # In bf16 on GPUs: Transformer Engine packs in no other precision.
    Check("attention", "packing", SameNumbers(Setting(FASTEST, training=PACKED))),
    Check("attention", "shared prompts",
          SameNumbers(Setting(FASTEST, attention="sdpa", training={**PACKED, "share_prompts": True}))),
    Check("attention", "fused loss head", SameNumbers(Setting(loss_head="fused"))),
    Check("attention", "fused loss kernels", SameNumbers(Setting(loss_head="fused", tile=128)), needs=a_gpu),
    Check("attention", "token by token", numbers.token_by_token),
    Check("split", "data",
          SameNumbers(Setting(parallelism={"use_distributed_optimizer": True}), world=True), **SPLIT),
    Check("split", "tensor", SameNumbers(Setting(split="tensor"), world=True), **SPLIT),
    Check("split", "tensor, with the sequence",
          SameNumbers(Setting(split="tensor", parallelism={"sequence_parallel": True}), world=True), **SPLIT),
    Check("split", "pipeline", SameNumbers(Setting(split="pipeline", at_most=4), world=True), **SPLIT),
    Check("split", "context", SameNumbers(Setting("bf16", split="context"), world=True),
          needs=lambda machine: several(machine) or te_on()(machine), every_rank=True),
    Check("split", "experts", SameNumbers(Setting(split="expert"), world=True, model=MIXTURE), **SPLIT),
    Check("training", "ED-GRPO step", SameNumbers(Setting(), world=True), every_rank=True),
    Check("training", "ED-iDPO step", SameNumbers(Setting(algorithm="idpo"), world=True), every_rank=True),
    Check("training", "checkpoint at another layout", numbers.checkpoint_at_another_layout, every_rank=True),
    Check("training", "speed", speed.training),
    Check("server", "vLLM, refit by disk", ServerRun(), every_rank=True),
    Check("server", "vLLM, refit by NCCL", ServerRun(TO_NCCL), needs=a_spare_gpu, every_rank=True),
    Check("server", "vLLM, asleep during training", ServerRun(ASLEEP), needs=a_gpu, every_rank=True),
]  # fmt: skip

_FP8 = "another recipe (precision.fp8_recipe), or bf16; docs/scaling.md has what each needs"
_PACKING = "train with packing=false, and report the versions of Transformer Engine and its attention kernels"
REMEDIES = {
    "same on all ranks": "start every rank in the same image or environment, on nodes of the same kind",
    "GPUs": "install a torch that is built for CUDA and for this driver, and see to CUDA_VISIBLE_DEVICES",
    "Transformer Engine": "pip install 'transformer-engine[pytorch]' as the Dockerfile does; without it there is no "
    "FP8, no context parallelism, and torch's attention",
    "NCCL of trainer and servers": "reinstall nvidia-nccl in the servers' environment; docs/servers.md",
    "connections": "open all ports between the nodes",
    "clocks": "synchronise them (NTP): the times of files and log lines mislead",
    "shared folder": "name a folder that every node can write to: --folder",
    "all-reduce": "run with NCCL_DEBUG=INFO (GPUs) and see which interface is taken; NCCL_SOCKET_IFNAME, "
    "GLOO_SOCKET_IFNAME",
    "fp32, as transformers": "compare the versions with those that nemo-edo doctor expects: nothing below can be "
    "trusted",
    "bf16": "train in fp32",
    **{f"fp8, {recipe}": _FP8 for recipe in ("tensorwise", "delayed", "blockwise", "mxfp8")},
    "attention": "set model.attention to one that passes",
    "packing": _PACKING,
    "shared prompts": _PACKING,
    "fused loss head": "set model.loss_head=logits",
    "fused loss kernels": "update triton and the driver; until it passes, set model.loss_head=logits and report the "
    "versions",
    "token by token": "set model.attention to one that passes above, or generate with servers (generation=vllm)",
    "split": "another split of the ranks; the all-reduce above tells whether they can reach each other",
    "training": "see the splits above",
    "checkpoint at another layout": "see that every node can write to and read the folder (--folder), and that it is "
    "not full",
    "speed": "the other checks say what does not work; without any, memory may be short",
}
"""What to do about a failure that has no remedy of its own, by a check's name or group."""
