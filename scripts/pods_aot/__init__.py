"""The parts of aot_pod.py: which models on which pods, their round as a program, and what its compiled text costs."""
