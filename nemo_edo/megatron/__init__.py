"""Adapters to megatron-core and Megatron-Bridge. Nothing here holds maths."""
