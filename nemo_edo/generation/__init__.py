"""Engines that generate responses: in process through Megatron, or with servers."""
