"""A Hugging Face checkpoint directory, read and checked before anything is allocated for it."""
