"""Loaded by vLLM's workers, in the server's environment. On a CPU, vLLM 0.32 computes the output layer from a packed
copy of its weights that it makes at the start. Where the layer shares the embedding's weights, a reload updates the
embedding but not that copy: the server then samples from a mixture of old and new weights."""


class TiedHead:
    """A worker extension (``--worker-extension-cls``)."""

    def reload_policy(self, weights_path):
        """``reload_weights``, the output layer included."""
        self.reload_weights(weights_path=weights_path)
        model = self.model_runner.get_model()
        head = getattr(model, "lm_head", None)  # Gemma 2 multiplies with its embedding
        if model.config.tie_word_embeddings and head is not None:
            head.quant_method.process_weights_after_loading(head)
