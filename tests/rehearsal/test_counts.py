"""What a step and a token may ask of a GPU, as tools/benchmarks/gpu_counts.py counts it: docs/performance.md."""

from pathlib import Path

import pytest
from gpu_counts import LAYERS, LAYOUTS, each_and_fixed, of_layers, total, write_model

DEVICE_CASES = "rehearsal.device_cases"
BYTES = ("bytes_to_device", "bytes_to_host")


def test_the_device_counts_what_cuda_would_launch_and_wait_for(gpu):
    expected = {
        "view": (0, 0), "slice": (0, 0), "empty": (0, 0), "add": (1, 0), "add in place": (1, 0), "number": (1, 0),
        "item": (0, 1), "to the host": (0, 1), "to the device": (0, 1), "from pinned memory": (0, 0),
        "to pinned memory, then waited for": (0, 1), "nonzero": (1, 1), "by a mask": (2, 1),
        "by an index of the host": (1, 1), "a number put at a mask": (1, 0), "compiled": (1, 0), "collective": (1, 0),
    }  # fmt: skip
    assert gpu.run(f"{DEVICE_CASES}:counted")[0] == expected


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("counted")
    made = {"two layers": {}, "four layers": {"layers": 4}, "words": {"vocab_size": 520}}
    return {name: write_model(folder / name, **{"name": "Llama", "layers": 2, **how}) for name, how in made.items()}


@pytest.fixture(scope="module")
def trained(gpu, folders) -> dict[str, dict]:
    found = {name: gpu.run("gpu_counts:training", folder=folder, parallelism={})[0] for name, folder in folders.items()}
    return found | {"deep": of_layers({2: found["two layers"], 4: found["four layers"]}, LAYERS["Llama"])}


def of_micro_batch(found: dict, name: str = "train_step"):
    return total(each_and_fixed(found, name, 1, 2)[0])


def test_a_micro_batch_of_32_layers_launches_at_most_a_tenth_more_than_bare_megatron(trained):
    assert of_micro_batch(trained["deep"])["launches"] <= 1.1 * of_micro_batch(trained["deep"], "bare")["launches"]


def test_a_micro_batch_waits_at_most_twice_and_metrics_leave_the_device_once_a_step(trained):
    for name in ("deep", "words"):
        assert of_micro_batch(trained[name])["synchronizations"] <= 2
        both = each_and_fixed(trained[name], "train_step", 1, 2)
        assert [phases["metrics"]["synchronizations"] for phases in both] == [0, 1]


def test_no_transfer_grows_with_the_vocabulary_or_with_other_ranks_rows(trained, two_gpus, folders):
    parallelism = LAYOUTS["two data-parallel"]
    of_two = two_gpus.run("gpu_counts:training", folder=folders["two layers"], parallelism=parallelism)[0]
    for name in ("train_step", "logprobs"):
        few, many, ranks = (of_micro_batch(found, name) for found in (trained["two layers"], trained["words"], of_two))
        assert [few[key] for key in BYTES] == [many[key] for key in BYTES] == [ranks[key] for key in BYTES]
    # Whether the metrics' names are those of the last step, and the metrics.
    assert each_and_fixed(of_two, "train_step", 1, 2)[1]["metrics"]["synchronizations"] == 2


def test_a_token_waits_once_for_all_rows_and_layers(gpu, folders):
    tokens = [
        total(each_and_fixed(gpu.run("gpu_counts:decoding", folder=folders[name], rows=rows)[0], "generate", 4, 8)[0])
        for name, rows in (("two layers", 2), ("four layers", 4), ("words", 4))
    ]
    assert [counts["synchronizations"] for counts in tokens] == [1, 1, 1]
    two_rows, four_rows, of_words = ([counts[key] for key in BYTES] for counts in tokens)
    assert four_rows == of_words == [2 * number for number in two_rows]
