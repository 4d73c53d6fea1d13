"""The refit of an engine that shares the trainer's weights."""

from __future__ import annotations

from nemo_edo.generation.fake import ScriptedEngine
from nemo_edo.refit.in_process import InProcessSync
from nemo_edo.types import GenerationRequest, SamplingParams


def test_rollouts_after_a_push_carry_its_version():
    engine = ScriptedEngine(lambda *_: "a", encode=lambda text: [5], decode=lambda ids: "a", stop_id=1)
    sync = InProcessSync(engine)
    versions = []
    for version in (1, 2, 9):
        sync.push(version)
        [rollout] = engine.generate([GenerationRequest("p", 0, (3,), 0)], SamplingParams(1.0, 1.0, 8))
        versions.append(rollout.policy_version)
    assert versions == [1, 2, 9]
