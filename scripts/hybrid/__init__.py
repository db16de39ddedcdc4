"""What train_hybrid.py is made of: corpus, tokenizer, sizes, objective, export, card."""
