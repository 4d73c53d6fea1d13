"""Which settings an unknown key may mean."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from nemo_edo.config import ALGORITHMS

MOST = 5
MEANS = {
    "batch": "minibatch_size",
    "clip": "clip_low",
    "cliprange": "clip_low",
    "dataset": "data",
    "epsilon": "clip_low",
    "gpus": "gpus_per_node",
    "group_size": "samples_per_prompt",
    "init_kl_coef": "beta",
    "kl_beta": "beta",
    "kl_coef": "beta",
    "learning_rate": "lr",
    "lora_rank": "rank",
    "max_completion_length": "max_new_tokens",
    "max_grad_norm": "clip_grad",
    "max_length": "max_new_tokens",
    "max_response_length": "max_new_tokens",
    "max_steps": "iterations",
    "max_tokens": "max_new_tokens",
    "model_name_or_path": "path",
    "num_epochs": "epochs",
    "num_generations": "samples_per_prompt",
    "num_iterations": "iterations",
    "num_return_sequences": "samples_per_prompt",
    "num_train_epochs": "epochs",
    "output": "output_dir",
    "out_dir": "output_dir",
    "per_device_train_batch_size": "micro_batch_size",
    "pp": "pipeline_model_parallel_size",
    "max_samples": "limit",
    "num_problems": "limit",
    "num_samples": "limit",
    "r": "rank",
    "rollout_n": "samples_per_prompt",
    "run_name": "name",
    "save_steps": "every_steps",
    "tp": "tensor_model_parallel_size",
    "train_batch_size": "minibatch_size",
}
"""Names of other trainers (TRL, verl, NeMo-RL, Hugging Face), and ours for the same."""


def suggestion(key: str, known: Collection[str]) -> str:
    """``; did you mean A, B or C?`` for an unknown key, or nothing where no known key is near it in name or meaning.

    A key of the same name in another section is nearer than one of another name: ``iterations`` means
    ``grpo.iterations``, ``idpo.iterations`` or that of one arm, and ``grpo.lr`` means ``grpo.optimizer.lr``. Other
    names have to be more alike across sections than within one.
    """
    found = _candidates(key, known)
    if not found:
        return ""
    section, _, name = found[0].partition(".")
    if section in ALGORITHMS and "." not in key:
        found = [*found, f"arms.NAME.{name} (of one arm)"]
    names = f"{', '.join(found[:-1])} or {found[-1]}" if found[1:] else found[0]
    return f"; did you mean {names}?"


def _candidates(key: str, known: Collection[str]) -> list[str]:
    section, _, name = key.rpartition(".")
    for meant in (name, MEANS.get(name)):
        same_name = [one for one in known if one.rpartition(".")[2] == meant]
        deeper = [one for one in same_name if section and one.startswith(f"{section}.")]
        if same_name:
            return (deeper or same_name)[:MOST]
    siblings = {one.rpartition(".")[2]: one for one in known if one.rpartition(".")[0] == section}
    anywhere = {one.rpartition(".")[2]: one for one in known}
    for names, alike in ((siblings, 0.5), (anywhere, 0.85)):
        near = difflib.get_close_matches(name, names, n=1, cutoff=alike)
        if near:
            return [names[near[0]]]
    return []
