"""What train_drafter.py is made of: prompts to train on, and prompts to measure on."""
