"""What only a machine without Transformer Engine uses; readers who work on GPUs can skip it.

The rule: ``megatron/layer_spec.py`` is the switch, and ``platform.enter`` applies ``without_cuda``. No other module
imports from here, as tests/unit/test_import_boundaries.py checks.
"""
