"""Engines that draw responses: in process through Megatron, or (each its own module) from a server."""
