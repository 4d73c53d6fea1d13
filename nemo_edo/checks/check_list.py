"""The checks of a machine, in their order: a failure explains those below it. A new one is a function and an entry
here; those of a config are in ``checks.doctor``."""

from __future__ import annotations

from functools import partial

from nemo_edo.checks import machine_checks, numbers
from nemo_edo.checks.machine import DOCTOR, NODES, SELFTEST, Check
from nemo_edo.checks.machine_checks import another_node, server_on_another_node, server_run, several, spare_gpus
from nemo_edo.checks.numbers import FASTEST, LONG, MIXTURE, PACKED, QWEN, SameNumbers, a_gpu, te_on

RANKS = {"runs_in": (SELFTEST, NODES), "needs": several, "every_rank": True}
HOPPER, BLACKWELL = te_on(9.0), te_on(10.0)
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
    "needs": several,
    "every_rank": True,
    "remedy": "another split of the ranks; the all-reduce above tells whether they can reach each other",
}
CONTEXT = {**SPLIT, "needs": lambda machine: several(machine) or te_on()(machine)}
TRAINING = {"every_rank": True, "remedy": "see the splits above"}

CHECKS = [
    Check("machine", "versions", machine_checks.versions, (DOCTOR,)),
    Check("machine", "packages", machine_checks.packages, (DOCTOR, SELFTEST)),
    Check("machine", "GPU", machine_checks.driver, (DOCTOR,)),
    Check("machine", "memory", machine_checks.memory, (DOCTOR,)),
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
    Check("precision", "fp32 products", numbers.products, needs=a_gpu,
          remedy="start every process with NVIDIA_TF32_OVERRIDE=0 in its environment"),
    Check("precision", "fp32, as transformers", numbers.against_transformers,
          remedy="compare the versions with those that nemo-edo doctor expects: nothing below can be trusted"),
    Check("precision", "grouped queries, biases, tied head", partial(numbers.against_transformers, model=QWEN),
          remedy="train a model without them, and report the versions of Transformer Engine and Megatron-Bridge"),
    Check("precision", "tf32", SameNumbers("tf32"), needs=a_gpu, remedy="train with precision.tf32=false"),
    Check("precision", "bf16", SameNumbers("bf16"), remedy="train in fp32"),
    Check("precision", "fp8, tensorwise", SameNumbers("fp8 tensorwise"), needs=HOPPER, **FP8),
    Check("precision", "fp8, delayed", SameNumbers("fp8 delayed"), needs=HOPPER, **FP8),
    Check("precision", "fp8, blockwise", SameNumbers("fp8 blockwise"), needs=HOPPER, **FP8),
    Check("precision", "fp8, mxfp8", SameNumbers("fp8 mxfp8"), needs=BLACKWELL, **FP8),
    Check("attention", "torch's", SameNumbers(attention="sdpa"), **ATTENTION),
    Check("attention", "Megatron's", SameNumbers(attention="local"), **ATTENTION),
    Check("attention", "Transformer Engine's", SameNumbers("bf16", attention="te"), needs=te_on(), **ATTENTION),
    # In bf16 on GPUs: Transformer Engine packs in no other precision.
    Check("attention", "packing", SameNumbers(FASTEST, training=PACKED), **PACKING),
    Check("attention", "shared prompts",
          SameNumbers(FASTEST, attention="sdpa", training={**PACKED, "share_prompts": True}), **PACKING),
    Check("attention", "long sequences", SameNumbers(FASTEST, length=LONG), needs=a_gpu, **ATTENTION),
    Check("attention", "fused loss head", SameNumbers(loss_head="fused"), remedy="set model.loss_head=logits"),
    Check("attention", "fused loss kernels", SameNumbers(loss_head="fused", tile=128), needs=a_gpu,
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
          **{**SPLIT, "needs": partial(several, least=4)}),
    Check("split", "context", SameNumbers("bf16", split="context"), **CONTEXT),
    Check("split", "context, grouped queries", SameNumbers("bf16", split="context", model=QWEN), **CONTEXT),
    Check("split", "context, packed", SameNumbers("bf16", split="context", model=QWEN, training=PACKED), **CONTEXT),
    Check("split", "experts", SameNumbers(split="expert", model=MIXTURE), **SPLIT),
    Check("training", "ED-GRPO step", SameNumbers(world=True), **TRAINING),
    Check("training", "ED-iDPO step", SameNumbers(algorithm="idpo", world=True), **TRAINING),
    Check("training", "checkpoint at another layout", numbers.checkpoint_at_another_layout, every_rank=True,
          remedy="see that every node can write to and read the folder (--folder), and that it is not full"),
    Check("training", "memory of a resume", numbers.memory_of_a_resume,
          needs=lambda machine: a_gpu(machine) or several(machine), every_rank=True,
          remedy="start fewer processes on a node, or set checkpoint.reshardable=false, and report the figures"),
    Check("training", "speed", numbers.speed,
          remedy="the other checks say what does not work; without any, memory may be short"),
    Check("server", "vLLM, refit by disk", server_run, every_rank=True),
    Check("server", "vLLM, refit by NCCL", lambda machine: server_run(machine, *TO_NCCL),
          needs=spare_gpus, every_rank=True),
    Check("server", "two vLLM servers over two GPUs each, refit by NCCL",
          lambda machine: server_run(machine, *TO_NCCL, *TWO), needs=partial(spare_gpus, count=4), every_rank=True),
    Check("server", "vLLM on another node, refit by disk", server_on_another_node, needs=another_node, every_rank=True),
    Check("server", "vLLM, asleep during training", lambda machine: server_run(machine, *ASLEEP),
          needs=a_gpu, every_rank=True),
]  # fmt: skip
