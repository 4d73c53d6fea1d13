"""Writes the table of model families into docs/models.md: a tiny random folder of each, made by transformers, is put
through all that a run does with a model, on this machine.

make env vllm-env
.venv/bin/python tools/docs/families_table.py [FAMILY ...]    # without families: all, half an hour of CPU
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from generated import between_markers

from nemo_edo.errors import UserError

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- families: written by tools/docs/families_table.py -->", "<!-- end of families -->"
RESULTS = ROOT / "tools" / "docs" / "families.json"
"""What was measured, by family: a family that is run anew replaces its own."""
SHAPE = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "initializer_range": 0.08,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
TIED = {"tie_word_embeddings": True}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4,
}  # fmt: skip
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
          "head_dim": 8}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5, "factor": 8.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
GEMMA = {**TIED, "query_pre_attn_scalar": 24, "sliding_window": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 2": ("llama", {}),
    "Llama 3.1 to 3.3": ("llama", {"rope_parameters": LLAMA3, "max_position_embeddings": 131072}),
    "Llama with attention_bias": ("llama", {"attention_bias": True}),
    "Mistral": ("mistral", {"sliding_window": None}),
    "Mistral with a window": ("mistral", {"sliding_window": 8}),
    "Ministral": ("ministral", {"sliding_window": 8}),
    "Qwen2, Qwen2.5": ("qwen2", {}),
    "Qwen3": ("qwen3", {}),
    "Qwen3-MoE": ("qwen3_moe", {**SPARSE, "norm_topk_prob": True}),
    "Gemma": ("gemma", TIED),
    "Gemma 2": ("gemma2", GEMMA),
    "Gemma 3": (
        "gemma3_text",
        {**GEMMA, "num_hidden_layers": 6, "layer_types": 5 * ["sliding_attention"] + ["full_attention"]},
    ),
    "OLMoE": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}),
    "GLM-4.5 (GLM-4-MoE)": ("glm4_moe", ROUTED),
    "GLM-4.7-Flash": ("glm4_moe_lite", {**ROUTED, **LATENT}),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "DeepSeek-V2": ("deepseek_v2", {**ROUTED, **LATENT}),
    "DeepSeek-V3, R1": ("deepseek_v3", {**ROUTED, **LATENT}),
    "Nemotron": ("nemotron", {}),
    "ERNIE 4.5": (
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48, "moe_num_shared_experts": 1,
         "moe_layer_start_index": 1},
    ),
    "EXAONE 4": ("exaone4", TIED),
    "EXAONE MoE": ("exaone_moe", SPARSE),
    "MiniMax-M2": ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 16}),
    "GLM-5": ("glm_moe_dsa", {**ROUTED, **LATENT}),
    "Nemotron-H": ("nemotron_h", {}),
    "Falcon-H1": ("falcon_h1", {}),
    "Qwen3-Next": ("qwen3_next", {**SPARSE, "layer_types": ["linear_attention", "full_attention"]}),
    "Qwen3.5": ("qwen3_5_text", {"layer_types": ["linear_attention", "full_attention"]}),
    "Gemma 4": ("gemma4_text", TIED),
    "DeepSeek-V4": ("deepseek_v4", {}),
}  # fmt: skip
BY_ITS_CODE = ("MiMo", "Kimi K2", "Step 3.5", "MiMo-V2-Flash", "Sarvam", "Ling (BailingMoeV2)", "Llama-Nemotron")
"""Families of Bridge that transformers computes by code in the model's folder only, which is not run."""
COLUMNS = {
    "logits": "log-probabilities", "trains": "trains", "resumes": "resumes", "decodes": "decodes",
    "exports": "exports", "lora": "LoRA", "tensor": "TP=2", "pipeline": "PP=2", "vllm": "vLLM",
}  # fmt: skip
ATTENTION = ["linear_qkv", "linear_proj"]
"""What adapters are for in a mixture of experts."""
SAME = 2e-4
"""Nats at most between two computations of the same log-probabilities in fp32."""


def write_folder(name: str, folder: Path, **other: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    kind, fields = FAMILIES[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SHAPE, **fields, **other}))
    with torch.no_grad():
        for parameter in model.state_dict().values():  # zeros hide what they are used for, such as a router's bias
            if parameter.is_floating_point() and (parameter.dim() == 1 or not parameter.any()):
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({str(index): index for index in range(SHAPE["vocab_size"])}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="0").save_pretrained(folder)


def examples():
    import torch

    from nemo_edo.types import TrainingBatch

    tokens = torch.randint(2, SHAPE["vocab_size"], (4, 40), generator=torch.Generator().manual_seed(1))
    return TrainingBatch(tokens, torch.ones(4, 39))


class Model:
    """A family's Megatron model on these processes."""

    def __init__(self, folder: Path, split: str | None = None, rank: int = 0) -> None:
        import torch

        from nemo_edo.config import LoRAConfig, OptimizerConfig, ParallelismConfig, PrecisionConfig, SFTConfig
        from nemo_edo.models import MegatronGPTSFTModel
        from nemo_edo.models.megatron_gpt_model import model_config
        from nemo_edo.worker.remote import policy_over

        sizes = {f"{split}_model_parallel_size": 2} if split else {}
        if "gpt_oss" in (folder / "config.json").read_text():
            sizes["expert_tensor_parallel_size"] = 1  # its experts have biases, which Megatron does not split
        latent = "kv_lora_rank" in (folder / "config.json").read_text()
        experts = "expert" in (folder / "config.json").read_text()  # Megatron's experts need it
        training = SFTConfig(optimizer=OptimizerConfig(lr=1e-3), micro_batch_size=2)
        self.model = MegatronGPTSFTModel(
            model_config(
                folder,
                parallelism=ParallelismConfig(**sizes, sequence_parallel=split == "tensor" and experts),
                precision=PrecisionConfig("fp32"),
                seed=0,
                training=training,
                lora=LoRAConfig(rank=rank, **({"targets": ATTENTION[latent:]} if experts else {})) if rank else None,
                threads=torch.get_num_threads(),
            )
        )
        self.policy = policy_over(self.model)

    def logprobs(self):
        return self.policy.logprobs(examples(), temperature=1.0)[0]

    def train(self, steps: int = 3) -> list[float]:
        self.policy.start_training(steps)
        metrics = [self.policy.train_step(examples(), exploration_weight=0.0) for _ in range(steps)]
        if not all(math.isfinite(one["grad_norm"]) and one["grad_norm"] > 0 for one in metrics):
            raise ValueError("a gradient is not finite, or zero")
        return [one["loss"] for one in metrics]


def dense(folder: Path):
    """transformers' log-probabilities of the examples."""
    import torch
    from transformers import AutoModelForCausalLM

    from nemo_edo.run.comparison import logprobs

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return model, logprobs(model, examples().tokens)


def differ(one, other, most: float = SAME) -> str:
    far = float((one - other).abs().max())
    if not far <= most:
        raise ValueError(f"differ by {far:.1e} nats")
    return f"{far:.0e}"


def require_less(losses: list[float]) -> str:
    if not losses[-1] < losses[0]:
        raise ValueError(f"the loss goes from {losses[0]:.4f} to {losses[-1]:.4f}")
    return "yes"


def one_process(folder: Path, scratch: Path) -> dict[str, str]:
    from nemo_edo.megatron import checkpoint
    from nemo_edo.megatron.bridge import check_model_folder
    from nemo_edo.megatron.hf_export import export_hf_folder
    from nemo_edo.megatron.layer_spec import check_family

    found: dict[str, str] = {}
    check_family(check_model_folder(folder)["model_type"], "config.json")
    reference, expected = dense(folder)
    first = Model(folder)

    def column(name: str, work: Callable[[], str]) -> None:
        found[name] = tried(work)

    def resumes() -> str:
        checkpoint.save(first.model.policy, scratch / "checkpoint")
        again = Model(folder)
        checkpoint.load(again.model.policy, scratch / "checkpoint")
        differ(again.logprobs(), first.logprobs(), 0.0)
        return "yes"

    def exports(model: Model, out: Path) -> str:
        export_hf_folder(model.model.built, out)
        return differ(model.logprobs(), dense(out)[1])

    def lora() -> str:
        adapted = Model(folder, rank=4)
        require_less(adapted.train())
        return exports(adapted, scratch / "merged")

    column("logits", lambda: differ(first.logprobs(), expected))
    column("decodes", lambda: decodes(first.model, reference))
    column("trains", lambda: require_less(first.train()))
    column("resumes", resumes)
    column("exports", lambda: exports(first, scratch / "out"))
    column("lora", lora)
    return found


def decodes(model: Any, reference: Any) -> str:
    """Whether 12 greedy tokens are those of a pass of transformers over everything before each of them."""
    import torch

    from nemo_edo.generation.megatron_engine import MegatronEngine
    from nemo_edo.types import GenerationRequest, SamplingParams

    model.model.eval()
    engine = MegatronEngine(model.built, stop_ids=[], decode=str, max_batch_size=4, device=model.platform_device)
    prompts = [tuple(row[:length].tolist()) for row, length in zip(examples().tokens, (3, 9, 20, 12), strict=True)]
    requests = [GenerationRequest(str(place), 0, prompt, seed=place) for place, prompt in enumerate(prompts)]
    for rollout in engine.generate(requests, SamplingParams(0.0, 1.0, 12)):
        ids = list(rollout.prompt_ids)
        for token in rollout.response_ids:
            with torch.no_grad():
                best = int(reference(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
            if token != best:
                raise ValueError("greedy tokens differ")
            ids.append(token)
    model.model.train()
    return "yes"


def tried(work: Callable[[], Any]) -> Any:
    """What a column says; a failure is a measurement here, whatever it raises."""
    try:
        return work()
    except UserError as error:
        return "refused: " + re.sub(r"/\S*/", "", str(error))
    except Exception as error:
        traceback.print_exc()
        return f"no: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def split_in_two(folder: Path, split: str) -> str:
    """In each of two processes."""
    model = Model(folder, split)
    far = differ(model.logprobs(), dense(folder)[1])
    require_less(model.train())
    return far


def served(name: str, folder: Path) -> str:
    """vLLM's log-probabilities of the examples, on a CPU, whose attention has no heads of 16."""
    import torch

    write_folder(name, folder, head_dim=32, hidden_size=32 * SHAPE["num_attention_heads"])
    tokens, found = folder / "tokens.json", folder / "logprobs.json"
    tokens.write_text(json.dumps(examples().tokens.tolist()))
    command = [
        str(ROOT / ".venv-vllm" / "bin" / "python"),
        str(Path(__file__).parent / "vllm_logprobs.py"),
        str(folder),
    ]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tokens), str(found)], env={**os.environ, **settings}, capture_output=True, text=True
    )
    if done.returncode:
        said = re.findall(r"^(?:[(\[].*?[)\]]:? )?([\w.]*(?:Error|Exception): .+)", done.stderr, re.MULTILINE)
        raise ValueError(said[0] if said else f"vLLM ended with status {done.returncode}")  # the first is the cause
    return differ(torch.tensor(json.loads(found.read_text())), dense(folder)[1])


def child(names: list[str], folders: Path, out: Path, split: str | None) -> None:
    from nemo_edo.utils.quiet import quiet_libraries

    quiet_libraries()
    from nemo_edo.megatron import platform

    platform.init_process_group(platform.enter(1))
    results = json.loads(out.read_text()) if out.exists() else {}
    for name in names:
        folder = folders / name.replace(" ", "_").replace("/", "_")
        print(f"--- {name}, {split or 'one process'}", flush=True)
        if split is None:
            found = tried(lambda: json.dumps(one_process(folder, Path(tempfile.mkdtemp(dir=folders)))))  # noqa: B023
            results[name] = json.loads(found) if found.startswith("{") else {"refused": found}
        elif "refused" not in results[name]:
            results[name][split] = tried(lambda: split_in_two(folder, split))  # noqa: B023
            if results[name][split].startswith("no: "):  # the other process may wait for this one
                out.write_text(json.dumps(results, indent=1))
                os._exit(1)
        if os.environ.get("RANK", "0") == "0":
            out.write_text(json.dumps(results, indent=1))


def main(names: list[str]) -> None:
    names = names or list(FAMILIES)
    with tempfile.TemporaryDirectory() as scratch:
        folders, out = Path(scratch), Path(scratch) / "results.json"
        refused = {}
        for name in names:
            folder = folders / name.replace(" ", "_").replace("/", "_")
            failure = tried(lambda: write_folder(name, folder))  # noqa: B023
            if failure:
                refused[name] = {"refused": failure}
                shutil.rmtree(folder, ignore_errors=True)
        made = [name for name in names if name not in refused]
        for split in ("", "tensor", "pipeline") if made else ():
            start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if split else []
            left = made
            while left:
                command = [sys.executable, *start, __file__, "--child", str(folders), str(out), split, *left]
                status = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
                done = json.loads(out.read_text())
                before, left = (
                    left,
                    [name for name in left if not {"refused", split or "logits"} & {*done.get(name, ())}],
                )
                if status and left == before:
                    sys.exit(status)
        found = {**refused, **(json.loads(out.read_text()) if made else {})}
        for name, row in found.items():
            if "refused" not in row:
                row["vllm"] = tried(lambda: served(name, folders / "served"))  # noqa: B023
                shutil.rmtree(folders / "served", ignore_errors=True)
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    versions = {name: version(name) for name in ("megatron-core", "megatron-bridge", "transformers", "torch")}
    rows = {**kept.get("rows", {}), **found}
    RESULTS.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def updated(page: str) -> str:
    """The page with the table of what was measured; raises ValueError as ``between_markers`` does."""
    return between_markers(page, BEGIN, END, table(json.loads(RESULTS.read_text())))


def table(measured: dict[str, Any]) -> str:
    heads = ["family", "model_type", *COLUMNS.values()]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    refused, notes = [], []
    for name, (kind, _) in FAMILIES.items():
        row = measured["rows"].get(name)
        if row is None:
            continue
        if "refused" in row:
            refused.append(f"| {name} | `{kind}` | {_sentence(row['refused'])} |")
            continue
        cells = []
        for column in COLUMNS:
            value = row.get(column, "not run")
            if value.startswith(("refused: ", "no: ")):
                notes.append(f"- {name}, {COLUMNS[column]}: {_sentence(value)}")
                value = "**no**"
            cells.append(value)
        lines.append(f"| {name} | `{kind}` | " + " | ".join(cells) + " |")
    versions = ", ".join(f"{name} {number}" for name, number in measured["versions"].items())
    others = f"| {', '.join(BY_ITS_CODE)} | | not run: transformers needs code from the model's folder |"
    return "\n".join([
        f"With {versions}, on a CPU.", "", *lines, "", *notes, "" if notes else "Every column was run.", "",
        "| refused | model_type | why |", "|---|---|---|", *refused, others,
    ]) + "\n"  # fmt: skip


def _sentence(text: str) -> str:
    text = text.removeprefix("refused: ").removeprefix("no: ").replace("|", "/").replace("\n", " ")
    return text if len(text) < 150 else text[:150].rsplit(" ", 1)[0] + " ..."


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[5:], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4] or None)
    else:
        main(sys.argv[1:])
