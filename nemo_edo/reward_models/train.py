"""Trains a process reward model by ranking NCE: ``nemo-edo train --config-name reward_model``. The folder
``output_dir/name`` gets ``model`` (a Hugging Face folder that ``nemo-edo score`` takes), ``results.json``, and, until
it is finished, ``checkpoints``, from which a killed training resumes."""

import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import get_last_checkpoint

from nemo_edo.config import RewardModelRunConfig, RewardTrainConfig
from nemo_edo.config.compose import resolved_yaml
from nemo_edo.data.model_folder import find_model
from nemo_edo.data.tokenizer import load_tokenizer
from nemo_edo.errors import UserError
from nemo_edo.losses import ranking_nce_loss
from nemo_edo.metrics import Interval, share_interval
from nemo_edo.reward_models.formats import DECODER, ENCODER, Encoded, OwnFormat, OwnSettings, write_own_settings
from nemo_edo.reward_models.heads import features, is_encoder, margins, own_class, own_config
from nemo_edo.reward_models.process_reward import computed
from nemo_edo.reward_models.step_data import TEST, TRAIN, VALIDATION, StepData, StepGroup, build_step_data, collate
from nemo_edo.run.inputs import model_folder
from nemo_edo.run.stored_run import StoredRun, open_run
from nemo_edo.run_folder import RunFolder

_EVALUATION_TOKENS = 16384  # tokens of a forward pass without gradients, padding included


def train_reward_model(cfg: RewardModelRunConfig) -> Path:
    """Trains, tests, writes and prints the results; returns the folder. The input is checked before any work on the
    model. An unfinished training of the same config resumes."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("a reward model is trained by one process: start it without torchrun")
    if cfg.threads is not None:
        torch.set_num_threads(cfg.threads)
    run = open_run(Path(cfg.data.run))
    folder, config = RunFolder(Path(cfg.output_dir) / cfg.name), resolved_yaml(cfg)
    folder.check_free(config)
    source, tokenizer, network_config = _sources(cfg, run)
    kind = own_class(network_config, source)
    settings = OwnSettings(ENCODER if is_encoder(kind) else DECODER, cfg.data.step_separator)
    data = build_step_data(run, cfg.data, OwnFormat(tokenizer, settings), cfg.seed)
    if (groups := len(data.groups[TRAIN])) < cfg.train.batch_size:
        raise UserError(f"train.batch_size is {cfg.train.batch_size}, but there are {groups} right steps to train on")
    longest = getattr(network_config, "max_position_embeddings", None)
    if longest is not None and cfg.data.max_tokens > longest:
        raise UserError(
            f"data.max_tokens is {cfg.data.max_tokens}, but the model takes {longest} tokens (max_position_embeddings)"
        )
    earlier = folder.open(config)
    try:
        if earlier:
            print(f"the earlier run of this config is kept as {earlier}")
        for part, counts in data.counts().items():
            print(f"{part}: {', '.join(f'{count} {name}' for name, count in counts.items())}".replace("_", " "))
        network = _new_network(cfg, kind, network_config)
        results = _train_and_test(cfg, folder, network, data)
        network.save_pretrained(folder.path / "model")
        tokenizer.save_pretrained(str(folder.path / "model"))
        write_own_settings(folder.path / "model", settings)
        folder.write_json("results.json", results)
        folder.write_json("summary.json", {"job": cfg.job, **results})  # marks the training as finished
        shutil.rmtree(folder.path / "checkpoints")
    finally:
        folder.close()
    for line in _summary(results):
        print(line)
    print(f"the reward model is in {folder.path / 'model'}, the results in {folder.path / 'results.json'}")
    return folder.path


def _sources(cfg: RewardModelRunConfig, run: StoredRun) -> tuple[str, PreTrainedTokenizerBase, Any]:
    """A description of the model's source, its tokenizer, and its config."""
    if cfg.model.path is not None:
        path = find_model(cfg.model.path)
        tokenizer = load_tokenizer(path)
        try:
            source = AutoConfig.from_pretrained(path, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise UserError(f"model.path: {path} has no config.json that transformers knows ({error})") from error
        where = f"model.path ({path})"
    else:
        tokenizer = load_tokenizer(model_folder(run.cfg.model, run.folder))
        where, fields = "model.architecture", dict(cfg.model.architecture)
        try:
            source = AutoConfig.for_model(fields.pop("model_type", None), **{"vocab_size": len(tokenizer), **fields})
        except ValueError as error:
            raise UserError(f"{where}: {error}") from error
    # Padding is masked, so any token works.
    pad = next((one for one in (tokenizer.pad_token_id, tokenizer.eos_token_id) if one is not None), 0)
    return where, tokenizer, own_config(source, pad)


def _new_network(cfg: RewardModelRunConfig, kind: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    """A network with a new head, and without ``model.path`` new weights, both determined by the seed."""
    set_seed(cfg.seed)
    if cfg.model.path is None:
        return kind._from_config(config)
    try:
        network, loaded = kind.from_pretrained(
            find_model(cfg.model.path), config=config, dtype=torch.float32, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"model.path: {cfg.model.path} cannot be loaded ({error})") from error
    missing = [name for name in loaded["missing_keys"] if name.startswith(f"{network.base_model_prefix}.")]
    if missing:
        raise UserError(f"model.path: {cfg.model.path} lacks {len(missing)} weights, such as {min(missing)}")
    return network


class NCETrainer(Trainer):
    """transformers' Trainer with the ranking loss, over batches of ``collate``."""

    def __init__(self, settings: RewardTrainConfig, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._settings = settings
        # The Trainer then divides by the number of a step's micro-batches, which have equal sizes.
        self.model_accepts_loss_kwargs = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        settings, ids, sizes = self._settings, inputs["input_ids"], inputs["sizes"]
        paths = torch.arange(len(ids), device=ids.device)
        with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=settings.dtype == "bfloat16"):
            seen = features(model, ids, inputs["attention_mask"], paths, inputs["ends"])
        rows = torch.split(margins(model, seen), sizes.tolist())  # log-odds; a group's right path is its first
        positives = torch.stack([row[0] for row in rows])
        negatives = torch.nn.utils.rnn.pad_sequence([row[1:] for row in rows], batch_first=True)
        mask = torch.arange(negatives.shape[1], device=sizes.device) < (sizes - 1)[:, None]
        term = ranking_nce_loss(
            positives, negatives, l2=settings.l2, negative_mask=mask.float(), weighting=settings.weighting
        )
        return term.mean()

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        accuracy = ranking_accuracy(self.model, self.eval_dataset, resamples=1, seed=0)
        found = {f"validation_{kind}": accuracy[kind]["mean"] for kind in accuracy}
        self.log(dict(found))  # log() modifies its argument
        said = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
        print(f"step {self.state.global_step}: ranking accuracy {said}")
        return {}


def _train_and_test(
    cfg: RewardModelRunConfig, folder: RunFolder, network: PreTrainedModel, data: StepData
) -> dict[str, Any]:
    collator = partial(collate, pad_id=network.config.pad_token_id)
    checkpoints = folder.path / "checkpoints"
    datasets = {"train_dataset": data.groups[TRAIN], "eval_dataset": data.groups[VALIDATION]}
    arguments = _arguments(cfg, checkpoints)
    trainer = NCETrainer(cfg.train, model=network, args=arguments, data_collator=collator, **datasets)
    for callback in (PrinterCallback, ProgressCallback):  # results.json has the log that they would print
        trainer.remove_callback(callback)
    measured = partial(ranking_accuracy, network, resamples=cfg.bootstrap, seed=cfg.seed)
    parts = (VALIDATION, TEST)
    # The fields of the Trainer's log that do not depend on the clock.
    kept = ("step", "epoch", "loss", "grad_norm", "learning_rate", "validation_all", "validation_one_prefix")
    before = {part: measured(data.groups[part]) for part in parts}  # the Trainer has moved the network to its device
    for path in checkpoints.glob("checkpoint-*"):
        if not (path / "trainer_state.json").is_file():  # written last; a kill leaves a folder without it
            shutil.rmtree(path)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(checkpoints) if checkpoints.is_dir() else None)
    return {
        "data": {"run": cfg.data.run, "too_long": data.too_long, **data.counts()},
        "parameters": network.num_parameters(),
        "ranking_accuracy": {part: {"before": before[part], "after": measured(data.groups[part])} for part in parts},
        "history": [{name: one[name] for name in kept if name in one} for one in trainer.state.log_history],
    }


def _arguments(cfg: RewardModelRunConfig, folder: Path) -> TrainingArguments:
    train = cfg.train
    micro = train.micro_batch_size or train.batch_size
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=train.steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=train.batch_size // micro,
        dataloader_drop_last=True,  # so that all micro-batches have equal weight; each epoch drops other groups
        learning_rate=train.lr,
        lr_scheduler_type="cosine",
        warmup_steps=train.warmup_steps,
        weight_decay=train.weight_decay,
        max_grad_norm=train.clip_grad,
        logging_steps=max(1, train.steps // 100),
        eval_strategy="steps" if train.evaluate_every else "no",
        eval_steps=train.evaluate_every or None,
        save_steps=train.checkpoint_every,
        save_total_limit=2,
        seed=cfg.seed,
        data_seed=cfg.seed,
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
        report_to=[],
    )


def ranking_accuracy(
    network: PreTrainedModel, groups: Sequence[StepGroup], *, resamples: int, seed: int
) -> dict[str, dict[str, float]]:
    """How often a right step scores above a wrong step of the same question; a tie counts 1/2, chance is 1/2. For "all"
    pairs, and for pairs with "one_prefix" (absent where there are none): the mean over pairs, the 95 % interval over
    questions, and the numbers of pairs and questions."""
    was_training = network.training
    network.eval()
    parts = {Encoded(path, (len(path) - 1,)) for group in groups for path in group.paths}
    scores = {part.ids: float(odds) for part, odds, _ in computed(network, parts, _EVALUATION_TOKENS)}
    network.train(was_training)
    wins: dict[str, dict[str, list[float]]] = {"all": {}, "one_prefix": {}}
    for group in groups:
        first, *others = (scores[path] for path in group.paths)
        for other, shared in zip(others, group.shared, strict=True):
            win = 1.0 if first > other else 0.5 if first == other else 0.0
            for name in ("all", "one_prefix") if shared else ("all",):
                wins[name].setdefault(group.problem_id, []).append(win)
    found = {}
    for name, of_question in wins.items():
        if of_question:
            sums, counts = (np.array([measure(one) for one in of_question.values()]) for measure in (sum, len))
            interval: Interval = share_interval(sums, counts, resamples=resamples, seed=seed)
            about = {"pairs": int(counts.sum()), "questions": len(of_question)}
            found[name] = {"mean": interval.mean, "low": interval.low, "high": interval.high, **about}
    return found


def _summary(results: dict[str, Any]) -> list[str]:
    lines = ["how often a right step scores above a wrong one of its question (chance: 0.5), with 95 % intervals:"]
    for part, moments in results["ranking_accuracy"].items():
        for moment, kinds in moments.items():
            for kind, one in kinds.items():
                what = f"{part}, {moment} training, {'all pairs' if kind == 'all' else 'pairs that share their prefix'}"
                of = f"{one['pairs']} pairs of {one['questions']} questions"
                lines.append(f"  {what}: {one['mean']:.3f} [{one['low']:.3f}, {one['high']:.3f}] ({of})")
    return lines
