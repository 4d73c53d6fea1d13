"""Exploration-driven optimisation (EDO) for LLM post-training on the Megatron/NeMo stack."""

__version__ = "0.1.0"
