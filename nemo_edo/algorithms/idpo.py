"""ED-iDPO and ETO: preference pairs from an iteration's own samples, and all of these samples for exploration."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nemo_edo.algorithms.collection import Collected, by_problem, view_of_sampler
from nemo_edo.config import IDPOConfig
from nemo_edo.data.batching import preference_pairs
from nemo_edo.errors import UserError
from nemo_edo.interfaces import Policy
from nemo_edo.types import PreferencePair, ScoredRollout, TrainingBatch
from nemo_edo.utils.phases import PhaseClock

PADDING = -1
"""A row that counts nowhere, next to a single response outside pairs: rows come in twos."""


@dataclass(frozen=True)
class IDPO:
    """``collection.Objective`` of iterative DPO (ETO) and ED-iDPO, as ``config`` says."""

    config: IDPOConfig
    pad_id: int
    seed: int

    def build(self, scored: Sequence[ScoredRollout], policy: Policy, clock: PhaseClock) -> Collected:
        """An item is a prompt: its pairs, and those of its samples that only the exploration term is for.

        A prompt whose rewards are all equal has no pair, but its samples still serve the exploration term.
        """
        sampled, statistics = view_of_sampler(
            scored, policy, clock, pad_id=self.pad_id, with_reference=True, old_logprobs=self.config.old_logprobs
        )
        row_of = {id(item): row for row, item in enumerate(scored)}
        rows, roles, explored, items = [], [], [], []
        pairs_of_prompts = []
        for problem, group in by_problem(scored).items():
            version = group[0].rollout.policy_version
            pairs = preference_pairs(group, self.config.pairs_per_prompt, f"{self.seed} {version} {problem}")
            pairs_of_prompts.append(len(pairs))
            paired = [row_of[id(item)] for pair in pairs for item in (pair.chosen, pair.rejected)]
            exploring = self._exploring(pairs, group, row_of)
            alone = [row for row in exploring if row not in paired]
            alone += [PADDING] * (len(alone) % 2)
            if paired or alone:
                items.append(list(range(len(rows), len(rows) + len(paired) + len(alone))))
            # A response of several pairs explores once: in the first of its rows.
            first = [row in exploring and row not in paired[:place] for place, row in enumerate(paired)]
            rows += paired + alone
            roles += [1, -1] * len(pairs) + [0] * len(alone)
            explored += first + [row != PADDING for row in alone]
        if not rows:
            raise UserError(
                f"no pairs: none of the {len(pairs_of_prompts)} prompts has both a success (a reward of at least "
                "rewards.success_at) and a failure, and nothing explores; sample more responses, or other problems"
            )
        index = torch.tensor(rows)
        real, batch = index != PADDING, sampled.rows(index.clamp(min=0))
        batch = batch.with_fields(
            mask=batch.mask * real[:, None],
            pair_role=torch.tensor(roles),
            exploration_factors=torch.tensor(explored).float(),
        )
        statistics |= {
            "pairs": float(sum(pairs_of_prompts)),
            "prompts_without_pairs": float(pairs_of_prompts.count(0)),
        }
        return Collected(batch, items, statistics)

    def minibatch(self, collected: Collected, items: Sequence[int], seed: str) -> TrainingBatch:
        return collected.batch.rows(torch.tensor([row for item in items for row in collected.items[item]]))

    def _exploring(self, pairs: Sequence[PreferencePair], group: Sequence[ScoredRollout], row_of) -> list[int]:
        """The samples of a prompt that the exploration term runs over; none where it has no weight."""
        wanted = self.config.exploration_samples
        if not self.config.exploration_weight:
            return []
        if wanted == "paired":
            return sorted({row_of[id(item)] for pair in pairs for item in (pair.chosen, pair.rejected)})
        return [row_of[id(item)] for item in (group if wanted == "all" else group[: int(wanted)])]
