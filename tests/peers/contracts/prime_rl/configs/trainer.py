from pydantic import BaseModel


class DefaultLossConfig(BaseModel, extra="forbid"):
    adv_tau: float = 1.0
    kl_tau: float = 1e-3
