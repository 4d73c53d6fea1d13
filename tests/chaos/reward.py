"""A reward that an untrained model earns at times, so that there is something to learn."""


def score(*, response: str) -> float:
    return float(len(response) % 2)
