"""What train_hybrid.py is made of: corpus, tokenizer, shape, forward pass, objective, export, card."""
