"""Scripts that make the embedded model: text, tokenizer, network, training, evaluation."""
