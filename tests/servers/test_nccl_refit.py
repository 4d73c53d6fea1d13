"""The refit from GPU to GPU with a real vLLM server, over a stub of NCCL: vLLM's routes, worker, transfer engine and
loading against our sender."""

import shutil

import pytest

pytestmark = [
    pytest.mark.servers,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler"),
]


def test_after_each_broadcast_the_server_answers_as_the_trainer_also_where_it_was_killed_in_the_middle(found_by):
    results = found_by("nccl_refit_worker")
    for version, push in enumerate(results):
        assert push["greedy_same"] == 40 and push["largest_gap"] < 1e-3
        assert (push["versions"], push["name"]) == ([version], f"run/{version}")
    assert [push["starts"] for push in results] == [1, 1, 2]
    texts = [push["greedy"] for push in results]
    assert all(one != other for one, other in zip(texts, texts[1:], strict=False))
