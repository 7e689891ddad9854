"""A tiny Llama pre-trained from scratch on generated text, and a small task to fine-tune it on."""
