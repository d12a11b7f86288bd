"""From what a user gives to token ids and back: tokenizer, conversation, chat template."""
