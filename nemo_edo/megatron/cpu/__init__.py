"""Code for machines without Transformer Engine; readers who work on GPUs can skip it. ``layer_spec.py`` is the
switch, ``platform.enter`` applies ``without_cuda``, and no other module imports from here (a test checks it)."""
