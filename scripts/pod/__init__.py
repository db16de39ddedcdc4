"""What tpu_pod.py is made of: prompts from files, hosts that agree, results that survive a kill, the serving loop."""
