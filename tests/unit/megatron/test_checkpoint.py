import io
import itertools
import math
import os
import pickle
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from nemo_edo.config import LoRAConfig, OptimizerConfig, ParallelismConfig
from nemo_edo.errors import DamagedCheckpoint, UserError
from nemo_edo.megatron import background, checkpoint
from nemo_edo.megatron.checkpoint import write_checksums
from nemo_edo.megatron.optimizer_state import rectangles
from nemo_edo.megatron.pickles import check_scales, plain_objects_only

OPTIMIZER = OptimizerConfig(lr=1e-3, warmup_steps=4, weight_decay=0.1)


def optimizer_tensors(policy) -> list[torch.Tensor]:
    """Moments, step counters and main weights (fp32), in the order of the parameters."""
    (inner,) = policy.optimizer.chained_optimizers
    parameters = [parameter for group in inner.optimizer.param_groups for parameter in group["params"]]
    states = [inner.optimizer.state[parameter] for parameter in parameters]
    moments = [torch.as_tensor(state[name]) for state in states for name in ("exp_avg", "exp_avg_sq", "step")]
    return [tensor.detach().clone() for tensor in [*parameters, *moments]]


LORA = LoRAConfig(rank=4, alpha=6.0)
EITHER = {"fp32": ("fp32", False, None), "bf16, distributed": ("bf16", True, None)}
RESUMED = {**EITHER, "fp32, distributed, adapters": ("fp32", True, LORA), "bf16, adapters": ("bf16", False, LORA)}


@pytest.fixture
def kind(request) -> dict:
    dtype, sharded, lora = request.param
    return {"dtype": dtype, "parallelism": ParallelismConfig(use_distributed_optimizer=sharded), "lora": lora}


@pytest.fixture
def trained(tiny, tiny_qwen2, kind):
    policy = tiny.build_policy(tiny_qwen2, **kind)
    policy.reset_optimizer(OPTIMIZER, total_steps=8)
    tiny.train_sft(policy, [0, 1])
    return policy


@pytest.fixture(params=[[], [5]], ids=["into a new one", "into a trained one"])
def other(request, tiny, tmp_path, kind):
    """A policy with other weights, as a new process has it, and one that was trained."""
    policy = tiny.build_policy(tiny.write_tiny_model(tmp_path / "other", seed=1), **kind)
    policy.reset_optimizer(OPTIMIZER, total_steps=8)
    tiny.train_sft(policy, request.param)
    return policy


@pytest.mark.parametrize("kind", RESUMED.values(), ids=RESUMED, indirect=True)
def test_a_policy_loaded_with_its_optimizer_resumes_to_the_last_bit(trained, other, tiny, tmp_path):
    checkpoint.save(trained, tmp_path / "checkpoint", with_optimizer=True)
    checkpoint.load(other, tmp_path / "checkpoint", with_optimizer=True)
    assert all(map(torch.equal, optimizer_tensors(other), optimizer_tensors(trained)))
    assert tiny.train_sft(other, [2, 3]) == tiny.train_sft(trained, [2, 3])
    for merged in (True, False):  # with adapters, the frozen weights too
        found, expected = tiny.exported(other, merged=merged), tiny.exported(trained, merged=merged)
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("kind", [("bf16", False, None), EITHER["bf16, distributed"]], indirect=True, ids=str)
def test_weights_alone_load_to_the_last_bit_and_the_next_step_starts_from_them(trained, other, tiny, tmp_path):
    """Not from the optimizer's own fp32 copies of what was there before."""
    checkpoint.save(trained, tmp_path / "checkpoint")
    checkpoint.load(other, tmp_path / "checkpoint")
    assert all(map(torch.equal, other.snapshot(), trained.snapshot()))
    tiny.train_sft(other, [2])
    for after, loaded in zip(other.snapshot(), trained.snapshot(), strict=True):
        assert (after - loaded).abs().max() < 0.02


def test_the_folder_appears_only_when_it_is_whole(policy, tmp_path, monkeypatch):
    """A save that breaks off at its end leaves no folder of that name, and does not stop the next one."""
    folder, really_save = tmp_path / "checkpoint", dist_checkpointing.save
    children = psutil.Process().children(recursive=True)

    def breaks_off(*args, **kwargs):
        really_save(*args, **kwargs)
        assert not folder.exists()
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(dist_checkpointing, "save", breaks_off)
        with pytest.raises(OSError, match="no space"):
            checkpoint.save(policy, folder)
    assert not folder.exists()
    checkpoint.save(policy, folder)
    checkpoint.load(policy, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert set(psutil.Process().children(recursive=True)) <= set(children), "a writer is left behind"


@pytest.fixture(scope="module")
def saved(policy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    checkpoint.save(policy, folder, extra={"position": {"step": 3}, "note": "α"})
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def test_extra_comes_back_as_given_and_a_later_save_of_the_same_name_replaces_it_all(policy, copy):
    assert checkpoint.load_extra(copy) == {"position": {"step": 3}, "note": "α"}
    checkpoint.save(policy, copy, extra={"new": True})
    assert checkpoint.load_extra(copy) == {"new": True}
    checkpoint.load(policy, copy)
    assert list(copy.parent.iterdir()) == [copy]


@pytest.mark.parametrize("kind", EITHER.values(), ids=EITHER, indirect=True)
@pytest.mark.parametrize("other", [[]], indirect=True)
def test_training_meanwhile_does_not_change_what_is_written(trained, other, tiny, tmp_path, held_writer):
    weights, state = trained.snapshot(), optimizer_tensors(trained)
    writing = checkpoint.begin_save(trained, tmp_path / "checkpoint", with_optimizer=True)
    tiny.train_sft(trained, [2, 3])
    assert not writing.is_finished()
    assert not (tmp_path / "checkpoint").exists()
    held_writer("checkpoint.part")
    while not writing.is_finished():
        time.sleep(0.01)
    checkpoint.load(other, tmp_path / "checkpoint", with_optimizer=True)
    assert all(map(torch.equal, other.snapshot(), weights))
    assert all(map(torch.equal, optimizer_tensors(other), state))
    assert not all(map(torch.equal, trained.snapshot(), weights))


@pytest.mark.timeout(100)
def test_a_writer_that_is_killed_is_an_error_leaves_no_folder_and_does_not_stop_the_next(policy, tmp_path, held_writer):
    folder, others = tmp_path / "checkpoint", set(psutil.Process().children(recursive=True))
    writing = checkpoint.begin_save(policy, folder)
    [writer] = set(psutil.Process().children()) - others
    writer.kill()
    with pytest.raises(UserError, match="checkpoint.part could not be written by rank 0: .*was killed"):
        writing.is_finished(wait=True)
    assert not folder.exists()
    held_writer("checkpoint.part")
    checkpoint.save(policy, folder)
    checkpoint.load(policy, folder)
    assert list(tmp_path.iterdir()) == [folder]
    psutil.wait_procs(left := set(psutil.Process().children(recursive=True)) - others, timeout=30)
    assert not any(process.is_running() for process in left)


def test_a_writer_ends_with_the_process_that_it_writes_for(monkeypatch):
    """It holds the other end of a pipe, which is at its end once no process holds it."""
    writer = filesystem_async.FileSystemWriterAsync
    monkeypatch.setattr(writer, "write_preloaded_data", lambda *_, **__: time.sleep(500))
    reading, writing = os.pipe()
    trainer = os.fork()
    if not trainer:
        written_for = os.getpid()
        if not os.fork():
            background._write([], written_for, None, 0, [()], None)
        time.sleep(0.5)  # until the writer has begun
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(writing)
    os.waitpid(trainer, 0)
    begun = time.monotonic()
    assert os.read(reading, 1) == b""
    os.close(reading)
    assert time.monotonic() - begun < 400, "the writer has slept to its end"


@pytest.mark.parametrize(("damage", "named"), [
    (lambda folder: os.truncate(max(folder.glob("*.distcp")), 9), r"\.distcp"),
    (lambda folder: (folder / "about.json").unlink(), "about.json"),
    (lambda folder: (folder / "checksums.json").unlink(), "checksums.json"),
    (lambda folder: (folder / "more").write_text(""), "more"),
])
def test_damage_is_noticed_before_anything_is_loaded(policy, copy, damage, named: str):
    """Damage of every kind to each of the files is in run/test_resume.py."""
    damage(copy)
    before = policy.snapshot()
    with pytest.raises(DamagedCheckpoint, match=rf"{copy} is damaged: .*{named}"):
        checkpoint.load(policy, copy)
    assert all(map(torch.equal, policy.snapshot(), before))


class RunsCode:
    """A pickle of it makes a folder when it is loaded."""

    def __init__(self, made) -> None:
        self.made = made

    def __reduce__(self):
        return os.mkdir, (str(self.made),)


class HidesCode(RunsCode):
    """The same, in a tensor's bytes."""

    def __reduce__(self):
        stored = io.BytesIO()
        torch.save(RunsCode(self.made), stored)
        return torch.storage._load_from_bytes, (stored.getvalue(),)


def object_that_runs_code(folder, made) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    objects = {name for name, about in metadata.state_dict_metadata.items() if isinstance(about, BytesStorageMetadata)}
    index, place = next((index, place) for index, place in metadata.storage_data.items() if index.fqn in objects)
    buffer = io.BytesIO()
    torch.save(RunsCode(made), buffer)
    metadata.storage_data = {MetadataIndex(index.fqn): replace(place, offset=0, length=len(buffer.getvalue()))}
    (folder / place.relative_path).write_bytes(buffer.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def metadata_that_names_another_folder(folder, _) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for at, place in metadata.storage_data.items():
        metadata.storage_data[at] = replace(place, relative_path="../" + place.relative_path)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("forge", [
    lambda folder, made: (folder / ".metadata").write_bytes(pickle.dumps(RunsCode(made))),
    lambda folder, made: (folder / ".metadata").write_bytes(pickle.dumps(HidesCode(made))),
    lambda folder, made: torch.save({"state": RunsCode(made)}, folder / "common.pt"),
    object_that_runs_code, metadata_that_names_another_folder,
], ids=["metadata", "its bytes", "common state", "object", "folder"])
def test_another_persons_checkpoint_runs_no_code_and_reads_no_file_elsewhere(policy, copy, tmp_path, forge):
    forge(copy, tmp_path / "made")
    write_checksums(copy, {})
    with pytest.raises(UserError, match="is not loaded: |cannot be loaded: "):
        checkpoint.load(policy, copy)
    assert not (tmp_path / "made").exists()


def test_another_architecture_and_a_missing_optimizer_state_are_refused(policy, tiny, saved, tmp_path):
    wider = tiny.build_policy(tiny.write_tiny_model(tmp_path / "wider", intermediate_size=128))
    with pytest.raises(UserError, match="intermediate_size is 96 there and 128 here"):
        checkpoint.load(wider, saved)
    with pytest.raises(UserError, match="no optimizer state"):
        checkpoint.load(policy, saved, with_optimizer=True)


@pytest.mark.parametrize(("dtype", "lora"), [("fp32", None), ("bf16", None), ("fp32", LORA)])
def test_a_reference_comes_back_to_the_last_bit_and_leaves_the_weights_alone(tiny, tiny_qwen2, tmp_path, dtype, lora):
    """In fp32 even with bf16 weights: moves below the spacing of bf16 add up in it."""
    policy = tiny.build_policy(tiny_qwen2, dtype=dtype, lora=lora)
    generator = torch.Generator().manual_seed(0)
    reference = [torch.randn(weight.shape, generator=generator) for weight in policy.snapshot()]
    before = policy.snapshot()
    checkpoint.save(policy, tmp_path / "checkpoint", reference=reference)
    checkpoint.load(policy, tmp_path / "checkpoint")
    assert all(map(torch.equal, policy.snapshot(), before))
    loaded = checkpoint.load_reference(policy, tmp_path / "checkpoint")
    assert [weight.dtype for weight in loaded] == [torch.float32] * len(reference)
    assert all(map(torch.equal, loaded, reference))


def test_scales_that_would_run_code_are_refused_also_where_a_tensors_bytes_hide_it(tmp_path: Path):
    for forged in (RunsCode, HidesCode):
        scales = torch.frombuffer(bytearray(pickle.dumps(forged(tmp_path / "made"))), dtype=torch.uint8)
        with pytest.raises(UserError, match="its layer._extra_state: "), plain_objects_only(tmp_path):
            check_scales(tmp_path, {"layer._extra_state": scales})
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 4), (1, 5), (4, 1, 2)])
def test_the_rectangles_of_every_range_are_the_range_in_its_order(shape: tuple[int, ...]):
    flat = torch.arange(math.prod(shape))
    for begin, end in itertools.combinations_with_replacement(range(len(flat) + 1), 2):
        blocks = list(rectangles(shape, begin, end))
        found = [flat.view(shape)[tuple(slice(o, o + n) for o, n in zip(*block, strict=True))].flatten()
                 for block in blocks]  # fmt: skip
        assert torch.equal(torch.cat([flat[:0], *found]), flat[begin:end])
        assert len(blocks) <= 2 * len(shape) - 1
