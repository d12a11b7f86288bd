"""From what a user gives to what the model takes: tokenizer, conversation, chat template; pictures to patches."""
