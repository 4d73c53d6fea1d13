"""What a judge was asked and replied, what that cost, and whether the rules (MathVerifier) agree."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from nemo_edo.config import JudgeConfig
from nemo_edo.metrics.paired import cohen_kappa

NO_VERDICT = "its reply has no verdict"
SHOWN_REASONS = 5


@dataclass
class JudgeReport:
    """Counts of one process since its last report."""

    replies: int = 0
    """Received, with or without a verdict."""
    cached: int = 0
    """Verdicts taken from the cache."""
    judged: int = 0
    """Responses with a verdict."""
    abstained: Counter[str] = field(default_factory=Counter)
    without_verdict: str = ""
    """The end of the first reply without a verdict."""
    """Responses without one, by reason."""
    prompt_tokens: int = 0
    """Without those of cached verdicts."""
    completion_tokens: int = 0
    agreement: Counter[tuple[bool, bool]] = field(default_factory=Counter)
    """Responses that the rules could verify too, by (judge's verdict, rules' verdict)."""

    def numbers(self, settings: JudgeConfig) -> dict[str, float | int]:
        """The numbers by name, for metrics.jsonl. cost: in the currency of the settings' prices, if set; agreement
        (share) and
        kappa: if the rules verified any."""
        found: dict[str, float | int] = {
            **{name: getattr(self, name) for name in ("replies", "cached", "judged")},
            "abstained": self.abstained.total(),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
        }
        if settings.prompt_price is not None:
            prompts, replies = self.prompt_tokens * settings.prompt_price, settings.completion_price
            found["cost"] = (prompts + self.completion_tokens * replies) / 1e6
        counts = [self.agreement[pair] for pair in ((True, True), (True, False), (False, True), (False, False))]
        compared = sum(counts)
        if compared:
            same = (counts[0] + counts[3]) / compared
            found |= {"compared": compared, "agreement": same, "kappa": cohen_kappa(*counts)}
        return found

    def explained(self, reason: str) -> str:
        """The reason for an abstention, with a reply where it is about replies."""
        return f"{reason}, such as one that ends {self.without_verdict!r}" if reason == NO_VERDICT else reason

    def in_words(self, settings: JudgeConfig) -> str:
        numbers = self.numbers(settings)
        spent = f", which cost {numbers['cost']:.4g}" if "cost" in numbers else ""
        said = [
            f"the judge gave verdicts on {self.judged} responses and abstained on {numbers['abstained']}",
            f"{self.replies} replies received, {self.cached} verdicts from the cache",
            f"{self.prompt_tokens} prompt tokens and {self.completion_tokens} completion tokens{spent}",
        ]
        if "kappa" in numbers:
            said.append(
                f"the rules agree on {numbers['agreement']:.1%} of {numbers['compared']} responses, Cohen's kappa "
                f"{numbers['kappa']:.3f}"
            )
        said += [
            f"no verdict on {count}: {self.explained(reason)}"
            for reason, count in self.abstained.most_common(SHOWN_REASONS)
        ]
        return "; ".join(said)
